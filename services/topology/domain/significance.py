"""Which differences are worth a new revision. Figures that jitter are not."""

from collections.abc import Sequence
from dataclasses import replace

from services.topology.domain.model import Link, Node, Throughput

MEMORY_STEP_BYTES = 64 * 2**20
MEMORY_STEP_FRACTION = 0.01
ROUND_TRIP_STEP_NS = 1_000_000
ROUND_TRIP_STEP_FRACTION = 0.5
THROUGHPUT_STEP_FRACTION = 0.2


def differs(held: Node, announced_memory_bytes: int, node: Node) -> bool:
    """Say whether a node's new report tells watchers something.

    Any difference does, except in available memory: that counts once it is more than 64 MiB and
    more than 1 % of the total away from the figure last announced, so that slow drift is told too.
    """
    if _without_figures(held) != _without_figures(node):
        return True
    step = max(MEMORY_STEP_BYTES, MEMORY_STEP_FRACTION * node.memory_total_bytes)
    return abs(node.memory_available_bytes - announced_memory_bytes) > step


def drifted(announced: Sequence[Link], links: Sequence[Link]) -> bool:
    """Say whether one source's links, in order, tell watchers something.

    Other links, kinds, ports, interfaces or RDMA devices do; a round trip (fastest or median) once
    it is more than 1 ms and more than half away from the figure last announced; a throughput that
    comes or goes, or is more than a fifth away.
    """
    if len(announced) != len(links):
        return True
    return any(
        before is not after and _differs(before, after)
        for before, after in zip(announced, links, strict=True)
    )


def _differs(before: Link, after: Link) -> bool:
    return (
        before.sink != after.sink
        or before.sink_address != after.sink_address
        or before.kind is not after.kind
        or before.sink_port != after.sink_port
        or before.source_interface != after.source_interface
        or before.rdma_device != after.rdma_device
        or _round_trip_differs(before.round_trip_ns, after.round_trip_ns)
        or _round_trip_differs(before.round_trip_median_ns, after.round_trip_median_ns)
        or _throughput_differs(before.throughput, after.throughput)
    )


def _round_trip_differs(before: int, after: int) -> bool:
    away = abs(after - before)
    return away > ROUND_TRIP_STEP_NS and away > ROUND_TRIP_STEP_FRACTION * before


def _throughput_differs(before: Throughput | None, after: Throughput | None) -> bool:
    if before is None or after is None:
        return before is not after
    away = abs(after.bytes_per_second - before.bytes_per_second)
    return away > THROUGHPUT_STEP_FRACTION * before.bytes_per_second


def _without_figures(node: Node) -> Node:
    return replace(node, memory_available_bytes=0, last_report_ns=0)
