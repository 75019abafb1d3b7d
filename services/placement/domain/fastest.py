"""The ring with the best predicted figure, of any size that is allowed.

Among a few nodes that is proven. Among more, rings that the default rules would choose, and the
same among the fastest nodes, are improved node by node; a better one may then exist.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from services.placement.domain.budget import Budget, OutOfSteps
from services.placement.domain.candidates import Candidates
from services.placement.domain.model import Model
from services.placement.domain.net import net_of
from services.placement.domain.request import Objective
from services.placement.domain.rings import Ring
from services.placement.domain.search import ring_of_size
from services.placement.domain.speed import Pace
from services.placement.domain.speed_exact import ExactSearch
from services.placement.domain.speed_split import Stages, split_by_speed

# All rings of so many nodes are looked at, in one way or another.
MOST_EXACT = 8
EXACT_STEPS = 4_000_000
# For looking around among more nodes, in the same measure.
STEPS = 1_000_000
# Of these, for finding a ring to start from by the default rules.
_START_STEPS = 100_000


@dataclass(frozen=True)
class Fastest:
    """Nodes in rank order, the layers of each, and how sure it is that no other ring is better."""

    order: Ring
    counts: tuple[int, ...]
    proven: bool
    compared_count: int


def with_known_speed(candidates: Candidates, pace: Pace) -> Candidates:
    """Return the calibrated nodes, joined where the links are measured."""
    able = [node for node in candidates.node_ids if pace.is_calibrated(node)]
    graph = candidates.graph.subgraph(able).copy()
    graph.remove_edges_from([pair for pair in graph.edges if not pace.is_measured(*pair)])
    return replace(candidates, node_ids=tuple(able), graph=graph, net=net_of(graph))


def fastest_ring(
    candidates: Candidates,
    pace: Pace,
    sizes: Sequence[int],
    objective: Objective,
    budget: Budget,
    parts: int = 1,
) -> Fastest | None:
    """Return the best ring of one of these sizes, ascending and without gaps; None: none found.

    `candidates` come from `with_known_speed`. `parts`: how many such questions share the usual
    steps, where there are more than a few nodes. Raises Stopped.
    """
    if len(candidates.node_ids) <= MOST_EXACT:
        parts = 1
    if not sizes or not candidates.required <= set(candidates.node_ids):
        return None
    stages = Stages(pace, candidates.rooms)
    nearby = _Nearby(candidates, stages, sizes, objective, budget, parts)
    # The exact search is quicker with a good ring to begin with, and needs no better one.
    nearby.run(improve=len(candidates.node_ids) > MOST_EXACT)
    some = _few(candidates, pace, nearby.order)
    few = candidates.only(some)
    exact = ExactSearch(
        stages,
        few,
        range(sizes[0], min(sizes[-1], len(some)) + 1) if len(some) >= sizes[0] else range(0),
        objective,
        budget.part(EXACT_STEPS // parts),
        nearby.figure,
    )
    complete = bool(exact.sizes) and exact.run()
    order = exact.order or nearby.order
    if order is None:
        return None
    counts = split_by_speed(stages, order, objective)
    assert counts is not None
    return Fastest(
        order,
        tuple(counts),
        complete and len(some) == len(candidates.node_ids),
        nearby.compared_count + exact.compared_count,
    )


def _few(candidates: Candidates, pace: Pace, order: Ring | None) -> list[str]:
    """Return the nodes among which every ring is looked at: all, or else the required ones, those
    of a good ring, and the fastest."""
    fastest = _by_speed(candidates, pace)
    if len(fastest) <= MOST_EXACT:
        return sorted(fastest)
    first = [*sorted(candidates.required), *(order or ()), *fastest]
    return sorted(list(dict.fromkeys(first))[:MOST_EXACT])


def _by_speed(candidates: Candidates, pace: Pace) -> list[str]:
    """Return nodes, the fastest first."""
    nodes = pace.cluster.nodes
    return sorted(candidates.node_ids, key=lambda n: (-nodes[n].weight_bytes_per_second, n))


class _Nearby:
    """Starts from rings that are easily found, and changes a node at a time while that helps."""

    def __init__(
        self,
        candidates: Candidates,
        stages: Stages,
        sizes: Sequence[int],
        objective: Objective,
        budget: Budget,
        parts: int,
    ) -> None:
        self.candidates, self.stages, self.pace = candidates, stages, stages.pace
        self.sizes = sizes
        self.objective, self.budget = objective, budget.part(STEPS // parts)
        self.start_steps = _START_STEPS // parts
        self.order: Ring | None = None
        self.figure: int | None = None
        self.compared_count = 0

    def run(self, *, improve: bool) -> None:
        """Leave the best found in `order` and `figure`."""
        found: dict[Ring, int] = {}
        try:
            for start in self._starts(self.pace.model):
                figure = None if start in found else self._figure(start, None)
                if figure is not None:
                    found[start] = figure
                    self._keep(start, figure)
            if improve:
                # The best first: the steps may not last for all.
                for start in sorted(found, key=lambda order: (found[order], order)):
                    self._improve(start, found[start])
        except OutOfSteps:
            pass

    def _starts(self, model: Model) -> Iterator[Ring]:
        """Yield rings by the default rules, of all nodes and of the fastest, in rank order."""
        by_speed = _by_speed(self.candidates, self.pace)
        required = sorted(self.candidates.required)
        # From the smallest that there is upwards, ever further apart.
        smallest, ahead = None, 0
        for number, size in enumerate(self.sizes):
            if smallest is not None and number < smallest + ahead and size != self.sizes[-1]:
                continue
            for pool in sorted({size, min(len(by_speed), size + 2), len(by_speed)}):
                some = list(dict.fromkeys([*required, *by_speed]))[: max(pool, len(required))]
                few = self.candidates.only(sorted(some))
                ring = ring_of_size(few, model, size, self.budget.part(self.start_steps)).ring
                if ring is None:
                    continue
                if smallest is None:
                    smallest = number
                ahead = max(1, 2 * (number - smallest))
                # The fastest last, for the head, is a good choice; the order may need another one.
                last = ring.index(min(ring, key=by_speed.index))
                turned = (*ring[last + 1 :], *ring[: last + 1])
                yield from (turned, (*reversed(turned[:-1]), turned[-1]), ring, ring[::-1])

    def _improve(self, order: Ring, figure: int) -> None:
        better: tuple[Ring, int] | None = (order, figure)
        while better is not None:
            order, figure = better
            self._keep(order, figure)
            changed = ((other, self._figure(other, figure)) for other in self._changed(order))
            better = next(((other, new) for other, new in changed if new is not None), None)

    def _keep(self, order: Ring, figure: int) -> None:
        if self.figure is None or figure < self.figure:
            self.order, self.figure = order, figure

    def _changed(self, order: Ring) -> Iterator[Ring]:
        """Yield rings that differ by a node: without one, with one more, with another, turned."""
        outside = [n for n in _by_speed(self.candidates, self.pace) if n not in order]
        size = len(order)
        for at, node in enumerate(order):
            kept = node in self.candidates.required
            if not kept and size - 1 >= self.sizes[0]:
                yield (*order[:at], *order[at + 1 :])
            for other in outside:
                if not kept:
                    yield (*order[:at], other, *order[at + 1 :])
                if size + 1 <= self.sizes[-1]:
                    yield (*order[:at], other, *order[at:])
        for a in range(size):
            for b in range(a + 1, size):
                yield (*order[:a], *reversed(order[a : b + 1]), *order[b + 1 :])

    def _figure(self, order: Ring, below: int | None) -> int | None:
        """Return what is to be small; None where it is no ring, no split fits, or it is not below
        a limit."""
        self.budget.spend(len(order))
        graph = self.candidates.graph
        if len(order) == 0 or any(
            not graph.has_edge(a, b)
            for a, b in zip(order, (*order[1:], order[0]), strict=True)
            if a != b
        ):
            return None
        self.compared_count += 1
        layers = self.pace.model.layer_count
        self.budget.spend(layers + layers * layers // 8)
        counts = split_by_speed(self.stages, order, self.objective, below)
        predicted = counts and self.pace.predict(order, counts)
        if not predicted:
            return None
        figure = predicted.decode_nanoseconds
        if self.objective is Objective.THROUGHPUT:
            figure = predicted.slowest.nanoseconds
        return figure if below is None or figure < below else None
