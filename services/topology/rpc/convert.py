"""Nodes, reports and the events of a watch as messages, and back."""

from collections.abc import Iterable
from itertools import groupby

from services.common.addresses import HostPort
from services.common.times import duration_of, nanoseconds, seconds, timestamp
from services.topology.domain.addresses import canonical
from services.topology.domain.model import (
    Backend,
    Change,
    Interface,
    Link,
    Misdirection,
    Node,
    Speed,
    Topology,
)
from services.topology.rpc.convert_hardware import (
    conflict_from_proto,
    port_from_proto,
    port_to_proto,
    rdma_from_proto,
    rdma_to_proto,
)
from services.topology.rpc.convert_links import (
    KINDS,
    kind_from_proto,
    link_from_proto,
    link_to_proto,
    misdirection_from_proto,
    misdirection_to_proto,
)
from shardring.common.v1 import common_pb2
from shardring.topology.v1 import topology_pb2 as pb
from shardring.topology.v1 import topology_service_pb2 as service_pb

_BACKENDS: dict[Backend, common_pb2.Backend.ValueType] = {
    backend: common_pb2.Backend.Value(f"BACKEND_{backend.name}") for backend in Backend
}
_BACKENDS_BACK = {number: backend for backend, number in _BACKENDS.items()}


def node_to_proto(node: Node) -> pb.Node:
    """Return a node as a message."""
    message = pb.Node(
        node_id=node.node_id,
        name=node.name,
        start_time=timestamp(node.start_ns),
        endpoints=[common_pb2.Endpoint(address=e.host, port=e.port) for e in node.endpoints],
        interfaces=[
            pb.NetworkInterface(name=i.name, kind=KINDS[i.kind], addresses=i.addresses)
            for i in node.interfaces
        ],
        memory_total_bytes=node.memory_total_bytes,
        memory_available_bytes=node.memory_available_bytes,
        backends=[_BACKENDS[backend] for backend in node.backends],
        machine_fingerprint=node.fingerprint,
        rdma=rdma_to_proto(node.rdma),
        thunderbolt_ports=[port_to_proto(port) for port in node.thunderbolt_ports],
        weight_bytes_per_second=node.speed.weight_bytes_per_second,
        multiply_adds_per_second=node.speed.multiply_adds_per_second,
    )
    if node.last_report_ns:
        message.last_report_time.CopyFrom(timestamp(node.last_report_ns))
    return message


def node_from_proto(message: pb.Node) -> Node:
    """Return a message's node, unchecked; backends this program does not know are left out."""
    known = (_BACKENDS_BACK.get(number) for number in message.backends)
    return Node(
        node_id=message.node_id,
        name=message.name,
        start_ns=nanoseconds(message.start_time),
        endpoints=tuple(HostPort(canonical(e.address), e.port) for e in message.endpoints),
        interfaces=tuple(
            Interface(i.name, kind_from_proto(i.kind), tuple(canonical(a) for a in i.addresses))
            for i in message.interfaces
        ),
        memory_total_bytes=message.memory_total_bytes,
        memory_available_bytes=message.memory_available_bytes,
        backends=tuple(dict.fromkeys(backend for backend in known if backend is not None)),
        last_report_ns=nanoseconds(message.last_report_time),
        fingerprint=message.machine_fingerprint,
        rdma=rdma_from_proto(message.rdma),
        thunderbolt_ports=tuple(port_from_proto(port) for port in message.thunderbolt_ports),
        speed=Speed(message.weight_bytes_per_second, message.multiply_adds_per_second),
    )


def links_request_to_proto(
    source: str,
    start_ns: int,
    links: Iterable[Link],
    misdirections: Iterable[Misdirection],
    now: float,
    *,
    probing: bool,
) -> service_pb.ReportLinksRequest:
    """Return the report, made at `now`, of all that one run of a node observed, so far where it is
    still `probing`."""
    return service_pb.ReportLinksRequest(
        source_node_id=source,
        links=[link_to_proto(link, now) for link in links],
        source_start_time=timestamp(start_ns),
        misdirections=map(misdirection_to_proto, misdirections),
        probing=probing,
    )


def start_ns_from_proto(request: service_pb.ReportLinksRequest) -> int | None:
    """Return which run of the source reports links, None where it is not said."""
    if not request.HasField("source_start_time"):
        return None
    return nanoseconds(request.source_start_time)


def lease_to_proto(
    lease_seconds: float, heartbeat_seconds: float, revision: int, *, links_wanted: bool
) -> service_pb.ReportNodeResponse:
    """Return the answer to a node's report."""
    return service_pb.ReportNodeResponse(
        lease=duration_of(lease_seconds),
        heartbeat_interval=duration_of(heartbeat_seconds),
        revision=revision,
        links_wanted=links_wanted,
    )


def heartbeat_seconds_from_proto(response: service_pb.ReportNodeResponse) -> float:
    """Return how often a node should report."""
    return seconds(response.heartbeat_interval)


def event_from_proto(message: service_pb.WatchTopologyResponse, now: float) -> Topology | Change:
    """Return what one message of a watch, which came at `now`, says."""
    if message.HasField("snapshot"):
        snapshot = message.snapshot
        return Topology(
            nodes=tuple(node_from_proto(node) for node in snapshot.nodes),
            links_by_source=tuple(
                tuple(link_from_proto(link, now) for link in links)
                for _, links in groupby(snapshot.links, key=lambda link: link.source_node_id)
            ),
            gathering=snapshot.gathering,
            conflicts=tuple(map(conflict_from_proto, snapshot.identity_conflicts)),
            misdirections=tuple(map(misdirection_from_proto, snapshot.misdirections)),
            one_way=_one_way(snapshot.links),
            probing=tuple(snapshot.probing_node_ids),
        )
    change = message.change
    return Change(
        updated=tuple(node_from_proto(node) for node in change.updated_nodes),
        removed=tuple(change.removed_node_ids),
        relinked=tuple(change.relinked_source_node_ids),
        links=tuple(link_from_proto(link, now) for link in change.links),
        gathering=change.gathering,
        conflicts=tuple(map(conflict_from_proto, change.identity_conflicts)),
        misdirections=tuple(map(misdirection_from_proto, change.misdirections)),
        one_way=_one_way(change.links),
        probing=tuple(change.probing_node_ids),
    )


def _one_way(links: Iterable[pb.Link]) -> frozenset[tuple[str, str]]:
    return frozenset((link.source_node_id, link.sink_node_id) for link in links if link.one_way)
