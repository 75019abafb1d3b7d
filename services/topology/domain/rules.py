"""What a report may say. Each refusal is INVALID_FIELD and names the field."""

import re
from collections.abc import Sequence, Sized
from functools import lru_cache

from services.common.errors import ShardringError, invalid_field
from services.topology.domain.addresses import can_link, is_dialable, parsed
from services.topology.domain.model import Link, Misdirection, Node, Speed

MAX_ENDPOINTS = 64
MAX_INTERFACES = 128
MAX_INTERFACE_ADDRESSES = 64
MAX_BACKENDS = 16
MAX_PORTS = 64
MAX_PORT_PEERS = 16
MAX_RDMA_DEVICES = 64
MAX_BITS_PER_SECOND = 10**15
MAX_LINKS = 16_384
MAX_MISDIRECTIONS = 4_096
MAX_MEMORY_BYTES = 2**50
MAX_TIME_NS = 253_402_300_799 * 10**9  # the last second of the year 9999
MAX_ROUND_TRIP_NS = 60 * 10**9
MAX_BYTES_PER_SECOND = 10**13
# A thousand times what the fastest machines reach.
MAX_WEIGHT_BYTES_PER_SECOND = 10**16
MAX_MULTIPLY_ADDS_PER_SECOND = 10**18

# What operating systems and Shardring name things with, in fields that may be empty.
_TOKEN = re.compile(r"[!-~]{0,64}")
_NODE_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_HOST_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")


def check_node_id(node_id: str, field: str) -> None:
    """Refuse what cannot be a node id."""
    if not _is_node_id(node_id):
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
    _check_token("node.machine_fingerprint", node.fingerprint)
    _check_hardware(node)
    _check_speed(node.speed)


def check_links(source: str, links: Sequence[Link], *, lab: bool) -> None:
    """Refuse links that `source` cannot have observed, whatever nodes there are."""
    check_node_id(source, "source_node_id")
    _check_length("links", links, MAX_LINKS)
    seen = set()
    for index, link in enumerate(links):
        if not _is_plain(source, link, lab) or (link.sink, link.sink_address) in seen:
            _check_link(f"links[{index}]", source, link, lab=lab)
            raise invalid_field(
                f"links[{index}]", f"{link.sink} at {link.sink_address}", "each link once"
            )
        seen.add((link.sink, link.sink_address))


def _is_plain(source: str, link: Link, lab: bool) -> bool:
    """Say whether `_check_link` would find nothing, without preparing what it would say."""
    return (
        link.source == source != link.sink
        and _is_node_id(link.sink)
        and _is_linkable(link.sink_address, lab)
        and 0 <= link.round_trip_ns <= MAX_ROUND_TRIP_NS
        and 0 <= link.round_trip_median_ns <= MAX_ROUND_TRIP_NS
        and 0 <= link.sink_port <= 65535
        and _is_interface_name(link.source_interface)
        and (
            link.throughput is None or 0 < link.throughput.bytes_per_second <= MAX_BYTES_PER_SECOND
        )
    )


@lru_cache(maxsize=65_536)
def _is_node_id(text: str) -> bool:
    return _NODE_ID.fullmatch(text) is not None


@lru_cache(maxsize=65_536)
def _is_linkable(text: str, lab: bool) -> bool:
    address = parsed(text)
    return address is not None and can_link(address, lab=lab)


@lru_cache(maxsize=4_096)
def _is_interface_name(text: str) -> bool:
    return len(text) <= 64 and text.isprintable()


def _check_link(field: str, source: str, link: Link, *, lab: bool) -> None:
    if link.source != source:
        raise invalid_field(f"{field}.source_node_id", link.source, f"the source, {source}")
    check_node_id(link.sink, f"{field}.sink_node_id")
    if link.sink == source:
        raise invalid_field(f"{field}.sink_node_id", link.sink, "another node than the source")
    if not _is_linkable(link.sink_address, lab):
        raise invalid_field(
            f"{field}.sink_address",
            link.sink_address,
            "an IP address that joins two machines (loopback only in lab mode)",
        )
    _check_figures(field, link)


def check_misdirections(source: str, misdirections: Sequence[Misdirection]) -> None:
    """Refuse misdirections that `source` cannot have observed, whatever nodes there are."""
    _check_length("misdirections", misdirections, MAX_MISDIRECTIONS)
    seen = set()
    for index, found in enumerate(misdirections):
        field = f"misdirections[{index}]"
        if found.source != source:
            raise invalid_field(f"{field}.source_node_id", found.source, f"the source, {source}")
        check_node_id(found.expected, f"{field}.expected_node_id")
        if found.answered:
            check_node_id(found.answered, f"{field}.answered_node_id")
        if found.answered == found.expected:
            raise invalid_field(
                f"{field}.answered_node_id", found.answered, "another node than the expected one"
            )
        if parsed(found.address) is None:
            raise invalid_field(f"{field}.address", found.address, "an IP address")
        if not 1 <= found.port <= 65535:
            raise invalid_field(f"{field}.port", found.port, "1 to 65535")
        if found.key in seen:
            raise invalid_field(field, f"{found.address}:{found.port}", "each address once")
        seen.add(found.key)


def _check_figures(field: str, link: Link) -> None:
    _check_range(f"{field}.round_trip", link.round_trip_ns, MAX_ROUND_TRIP_NS)
    _check_range(f"{field}.round_trip_median", link.round_trip_median_ns, MAX_ROUND_TRIP_NS)
    _check_range(f"{field}.sink_port", link.sink_port, 65535)
    if not _is_interface_name(link.source_interface):
        raise invalid_field(
            f"{field}.source_interface", link.source_interface, "up to 64 printable characters"
        )
    if link.throughput is not None and not (
        0 < link.throughput.bytes_per_second <= MAX_BYTES_PER_SECOND
    ):
        raise invalid_field(
            f"{field}.throughput_bytes_per_second",
            link.throughput.bytes_per_second,
            f"1 to {MAX_BYTES_PER_SECOND}, or absent",
        )


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


def _check_hardware(node: Node) -> None:
    _check_length("node.rdma.devices", node.rdma.devices, MAX_RDMA_DEVICES)
    for index, device in enumerate(node.rdma.devices):
        field = f"node.rdma.devices[{index}]"
        if not device.name:
            raise invalid_field(f"{field}.name", "", "the device's name")
        _check_token(f"{field}.name", device.name)
        _check_token(f"{field}.interface_name", device.interface)
    _check_length("node.thunderbolt_ports", node.thunderbolt_ports, MAX_PORTS)
    for index, port in enumerate(node.thunderbolt_ports):
        field = f"node.thunderbolt_ports[{index}]"
        _check_token(f"{field}.interface_name", port.interface)
        _check_token(f"{field}.domain_id", port.domain)
        _check_token(f"{field}.bridge", port.bridge)
        _check_length(f"{field}.peer_domain_ids", port.peer_domains, MAX_PORT_PEERS)
        for peer in port.peer_domains:
            _check_token(f"{field}.peer_domain_ids", peer)
        _check_range(
            f"{field}.link_bits_per_second", port.link_bits_per_second, MAX_BITS_PER_SECOND
        )
        _check_range(f"{field}.generation", port.generation, 100)


def _check_speed(speed: Speed) -> None:
    bytes_per_second, multiply_adds = speed.weight_bytes_per_second, speed.multiply_adds_per_second
    _check_range("node.weight_bytes_per_second", bytes_per_second, MAX_WEIGHT_BYTES_PER_SECOND)
    _check_range("node.multiply_adds_per_second", multiply_adds, MAX_MULTIPLY_ADDS_PER_SECOND)
    if (bytes_per_second == 0) != (multiply_adds == 0):
        raise invalid_field(
            "node.multiply_adds_per_second",
            multiply_adds,
            "0 if and only if weight_bytes_per_second is 0: both are measured at once",
        )


def _check_token(field: str, text: str) -> None:
    if not _TOKEN.fullmatch(text):
        raise invalid_field(field, text, "at most 64 printable ASCII characters without spaces")


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
