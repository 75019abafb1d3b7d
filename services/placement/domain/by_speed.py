"""A placement that is best at what was asked for, or why there is none."""

from collections.abc import Sequence
from dataclasses import replace

from services.common.errors import Reason, ShardringError
from services.placement.domain.budget import Budget
from services.placement.domain.candidates import Candidates
from services.placement.domain.fastest import fastest_ring, with_known_speed
from services.placement.domain.placement import Placement, placement_of
from services.placement.domain.refusals import MOST_LISTED, MOST_NAMED, Asked
from services.placement.domain.search import TOTAL_STEPS, Found, ring_of_size
from services.placement.domain.speed import Pace


def place_by_speed(
    asked: Asked, sizes: Sequence[int], budget: Budget, parts: int = 1
) -> Placement | None:
    """Return the ring of these sizes, ascending, with the best predicted figure.

    `parts`: how many such questions share the steps of one.

    None where the cluster has no ring for the model, fast or slow. Raises NOT_CALIBRATED where it
    has one, of nodes and links whose speed is not known.
    """
    pace = Pace(asked.candidates.cluster, asked.model)
    known = with_known_speed(asked.candidates, pace)
    fastest = fastest_ring(known, pace, sizes, asked.request.objective, budget, parts)
    if fastest is None:
        slow = _any_ring(asked, sizes, budget, parts)
        if slow is not None and _lacks_figures(asked.candidates, known):
            raise _not_calibrated(asked.candidates, known)
        return slow
    found = Found(len(fastest.order), fastest.order, fastest.proven, fastest.compared_count)
    request_id = asked.request.request_id
    return placement_of(known, asked.model, found, None, request_id, fastest.counts)


def _any_ring(asked: Asked, sizes: Sequence[int], budget: Budget, parts: int) -> Placement | None:
    """Return the first that the default rules find."""
    steps = budget.part(TOTAL_STEPS // parts)
    for size in sizes:
        found = ring_of_size(asked.candidates, asked.model, size, steps)
        if found.ring is not None:
            found = replace(found, proven=False)
            request_id = asked.request.request_id
            return placement_of(asked.candidates, asked.model, found, None, request_id)
    return None


def _lacks_figures(every: Candidates, known: Candidates) -> bool:
    return every.graph.number_of_edges() > known.graph.number_of_edges() or len(
        every.node_ids
    ) > len(known.node_ids)


def _not_calibrated(every: Candidates, known: Candidates) -> ShardringError:
    unknown = [node for node in every.node_ids if node not in known.node_ids]
    pairs = [
        (a, b)
        for a, b in sorted(tuple(sorted(pair)) for pair in every.graph.edges)
        if a in known.graph and b in known.graph and not known.graph.has_edge(a, b)
    ]
    nodes = every.cluster.nodes
    faults = []
    if unknown:
        names = ", ".join(nodes[node].name for node in unknown[:MOST_NAMED])
        faults.append(f"not calibrated yet: {names}")
    if pairs:
        named = "; ".join(f"{nodes[a].name} and {nodes[b].name}" for a, b in pairs[:MOST_NAMED])
        faults.append(f"links not measured yet: between {named}")
    return ShardringError(
        Reason.NOT_CALIBRATED,
        "No ring can be made of nodes and links whose speed is known; "
        f"{'; '.join(faults)}. Nodes calibrate themselves soon after their start, while no "
        "instance runs on them. Wait for that, or ask without an objective.",
        metadata={
            "node_ids": ",".join(unknown[:MOST_LISTED]),
            "node_count": len(unknown),
            "unmeasured_pairs": ",".join(f"{a}->{b}" for a, b in pairs[:MOST_LISTED]),
        },
    )
