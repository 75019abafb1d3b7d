"""Nodes and links for tests, with what a test does not care about filled in."""

from typing import Any

from services.common.addresses import HostPort
from services.topology.domain.model import Backend, Interface, InterfaceKind, Link, Node

GIB = 2**30


def node(node_id: str = "a", address: str = "10.0.0.1", port: int = 52420, **fields: Any) -> Node:
    values: dict[str, Any] = {
        "node_id": node_id,
        "name": f"studio-{node_id}",
        "start_ns": 1_000,
        "endpoints": (HostPort(address, port),),
        "interfaces": (Interface("en0", InterfaceKind.ETHERNET, (address,)),),
        "memory_total_bytes": 16 * GIB,
        "memory_available_bytes": 8 * GIB,
        "backends": (Backend.CPU,),
    }
    return Node(**{**values, **fields})


def link(source: str, sink: str, address: str, round_trip_ns: int = 1_000_000) -> Link:
    return Link(source, sink, address, InterfaceKind.ETHERNET, round_trip_ns)
