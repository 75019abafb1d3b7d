"""What a report may say. Each refusal is INVALID_FIELD and names the field."""

import re
from collections.abc import Sequence, Sized

from services.common.errors import ShardringError, invalid_field
from services.topology.domain.addresses import can_link, is_dialable, parsed
from services.topology.domain.model import Link, Node

MAX_ENDPOINTS = 64
MAX_INTERFACES = 128
MAX_INTERFACE_ADDRESSES = 64
MAX_BACKENDS = 16
MAX_LINKS = 16_384
MAX_MEMORY_BYTES = 2**50
MAX_TIME_NS = 253_402_300_799 * 10**9  # the last second of the year 9999
MAX_ROUND_TRIP_NS = 60 * 10**9

_NODE_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_HOST_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")


def check_node_id(node_id: str, field: str) -> None:
    """Refuse what cannot be a node id."""
    if not _NODE_ID.fullmatch(node_id):
        raise invalid_field(field, node_id, "1 to 64 letters, digits, '-' or '_'")


def check_node(node: Node) -> None:
    """Refuse a node report that is malformed or absurd."""
    check_node_id(node.node_id, "node.node_id")
    if not 1 <= len(node.name) <= 255 or not node.name.isprintable():
        raise invalid_field("node.name", node.name, "1 to 255 printable characters")
    if not 0 < node.start_ns <= MAX_TIME_NS:
        raise invalid_field("node.start_time", node.start_ns, "when this run of the node started")
    if not node.endpoints:
        raise invalid_field("node.endpoints", "", "at least one endpoint")
    _check_length("node.endpoints", node.endpoints, MAX_ENDPOINTS)
    for index, endpoint in enumerate(node.endpoints):
        _check_host(f"node.endpoints[{index}].address", endpoint.host)
        if not 1 <= endpoint.port <= 65535:
            raise invalid_field(f"node.endpoints[{index}].port", endpoint.port, "1 to 65535")
    _check_interfaces(node)
    _check_range("node.memory_total_bytes", node.memory_total_bytes, MAX_MEMORY_BYTES)
    _check_range(
        "node.memory_available_bytes", node.memory_available_bytes, node.memory_total_bytes
    )
    _check_length("node.backends", node.backends, MAX_BACKENDS)


def check_links(source: str, links: Sequence[Link], *, lab: bool) -> None:
    """Refuse links that `source` cannot have observed, whatever nodes there are."""
    check_node_id(source, "source_node_id")
    _check_length("links", links, MAX_LINKS)
    seen = set()
    for index, link in enumerate(links):
        field = f"links[{index}]"
        if link.source != source:
            raise invalid_field(f"{field}.source_node_id", link.source, f"the source, {source}")
        check_node_id(link.sink, f"{field}.sink_node_id")
        if link.sink == source:
            raise invalid_field(f"{field}.sink_node_id", link.sink, "another node than the source")
        address = parsed(link.sink_address)
        if address is None or not can_link(address, lab=lab):
            raise invalid_field(
                f"{field}.sink_address",
                link.sink_address,
                "an IP address that joins two machines (loopback only in lab mode)",
            )
        _check_range(f"{field}.round_trip", link.round_trip_ns, MAX_ROUND_TRIP_NS)
        if link.key in seen:
            raise invalid_field(field, f"{link.sink} at {link.sink_address}", "each link once")
        seen.add(link.key)


def not_advertised(index: int, link: Link) -> ShardringError:
    """Return the refusal of a link to an address that its live sink does not advertise."""
    return invalid_field(
        f"links[{index}].sink_address",
        link.sink_address,
        f"one of the addresses that node {link.sink} advertises",
    )


def _check_interfaces(node: Node) -> None:
    _check_length("node.interfaces", node.interfaces, MAX_INTERFACES)
    for index, interface in enumerate(node.interfaces):
        field = f"node.interfaces[{index}]"
        if not 1 <= len(interface.name) <= 64 or not interface.name.isprintable():
            raise invalid_field(f"{field}.name", interface.name, "1 to 64 printable characters")
        _check_length(f"{field}.addresses", interface.addresses, MAX_INTERFACE_ADDRESSES)
        for address in interface.addresses:
            if parsed(address) is None:
                raise invalid_field(f"{field}.addresses", address, "an IP address")


def _check_host(field: str, host: str) -> None:
    address = parsed(host)
    is_name = bool(_HOST_NAME.fullmatch(host)) and not host.rpartition(".")[2].isdigit()
    if address is None and not is_name:
        raise invalid_field(field, host, "an IP address without brackets, or a host name")
    if address is not None and not is_dialable(address):
        raise invalid_field(field, host, "an address that other machines can dial")


def _check_length(field: str, items: Sized, limit: int) -> None:
    if len(items) > limit:
        raise invalid_field(field, f"{len(items)} entries", f"at most {limit}")


def _check_range(field: str, value: int, limit: int) -> None:
    if not 0 <= value <= limit:
        raise invalid_field(field, value, f"0 to {limit}")
