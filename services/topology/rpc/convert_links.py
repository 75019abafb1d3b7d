"""Links and misdirections as messages, and back.

Ages stand in messages, moments on this process's own monotonic clock in the domain: so the clocks
of two machines are never compared.
"""

import math
from functools import lru_cache

from google.protobuf.duration_pb2 import Duration

from services.common.times import nanoseconds, seconds
from services.topology.domain.addresses import canonical
from services.topology.domain.model import InterfaceKind, Link, Misdirection, Throughput
from shardring.topology.v1 import topology_pb2 as pb

KINDS: dict[InterfaceKind, pb.InterfaceKind.ValueType] = {
    kind: pb.InterfaceKind.Value(f"INTERFACE_KIND_{kind.name}") for kind in InterfaceKind
}
_KINDS_BACK: dict[int, InterfaceKind] = {number: kind for kind, number in KINDS.items()}

# Addresses come again with every report.
_canonical = lru_cache(maxsize=65_536)(canonical)


def kind_from_proto(number: int) -> InterfaceKind:
    """Return a kind; UNKNOWN where it is not stated or a newer program's."""
    return _KINDS_BACK.get(number, InterfaceKind.UNKNOWN)


def link_to_proto(
    link: Link, now: float, *, one_way: bool = False, ahead_seconds: float = 0
) -> pb.Link:
    """Return a link as a message that is sent at `now`, or up to `ahead_seconds` later.

    A throughput that is too old by then is left out; its age is stated as of then, in whole
    seconds rounded up.
    """
    # Field by field, which takes a quarter of the time: a full mesh has very many links.
    message = pb.Link()
    message.source_node_id = link.source
    message.sink_node_id = link.sink
    message.sink_address = link.sink_address
    message.kind = KINDS[link.kind]
    _set_duration(message.round_trip, link.round_trip_ns)
    message.sink_port = link.sink_port
    message.source_interface = link.source_interface
    _set_duration(message.round_trip_median, link.round_trip_median_ns)
    message.one_way = one_way
    message.rdma_device = link.rdma_device
    if link.throughput is not None and link.throughput.is_current(now + ahead_seconds):
        message.throughput_bytes_per_second = link.throughput.bytes_per_second
        message.throughput_age.seconds = math.ceil(
            max(0.0, now + ahead_seconds - link.throughput.measured_at)
        )
    return message


def link_from_proto(message: pb.Link, now: float) -> Link:
    """Return the link of a message that came at `now`, unchecked.

    A throughput that is older than it may be is left out.
    """
    throughput = None
    if message.HasField("throughput_bytes_per_second"):
        age = seconds(message.throughput_age)
        throughput = Throughput(message.throughput_bytes_per_second, now - max(0.0, age))
        if not throughput.is_current(now):
            throughput = None
    return Link(
        source=message.source_node_id,
        sink=message.sink_node_id,
        sink_address=_canonical(message.sink_address),
        kind=kind_from_proto(message.kind),
        round_trip_ns=nanoseconds(message.round_trip),
        round_trip_median_ns=nanoseconds(message.round_trip_median),
        throughput=throughput,
        sink_port=message.sink_port,
        source_interface=message.source_interface,
        rdma_device=message.rdma_device,
    )


def misdirection_to_proto(found: Misdirection) -> pb.Misdirection:
    """Return a misdirection as a message."""
    return pb.Misdirection(
        source_node_id=found.source,
        expected_node_id=found.expected,
        answered_node_id=found.answered,
        address=found.address,
        port=found.port,
    )


def misdirection_from_proto(message: pb.Misdirection) -> Misdirection:
    """Return a message's misdirection, unchecked."""
    return Misdirection(
        source=message.source_node_id,
        expected=message.expected_node_id,
        answered=message.answered_node_id,
        address=_canonical(message.address),
        port=message.port,
    )


def _set_duration(message: Duration, count: int) -> None:
    if count >= 10**9:
        message.seconds = count // 10**9
    message.nanos = count % 10**9
