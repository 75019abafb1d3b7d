"""Which differences are worth a new revision. Figures that jitter are not."""

from collections.abc import Sequence
from dataclasses import replace

from services.topology.domain.model import Link, Node

MEMORY_STEP_BYTES = 64 * 2**20
MEMORY_STEP_FRACTION = 0.01
ROUND_TRIP_STEP_NS = 1_000_000
ROUND_TRIP_STEP_FRACTION = 0.5


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

    Other links or kinds do; a round trip once it is more than 1 ms and more than half away from
    the figure last announced.
    """
    if len(announced) != len(links):
        return True
    return any(
        before.key != after.key or before.kind != after.kind or _round_trip_differs(before, after)
        for before, after in zip(announced, links, strict=True)
    )


def _round_trip_differs(before: Link, after: Link) -> bool:
    step = max(ROUND_TRIP_STEP_NS, ROUND_TRIP_STEP_FRACTION * before.round_trip_ns)
    return abs(after.round_trip_ns - before.round_trip_ns) > step


def _without_figures(node: Node) -> Node:
    return replace(node, memory_available_bytes=0, last_report_ns=0)
