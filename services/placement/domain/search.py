"""Sizes upwards: the best ring of the fewest nodes, by leaf, download, memory, hops, ids."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import networkx as nx

from services.placement.domain.budget import Budget
from services.placement.domain.candidates import Candidates
from services.placement.domain.demand import demand_of, sizes_allowed
from services.placement.domain.heaviest_ring import HeaviestWalk
from services.placement.domain.model import Model
from services.placement.domain.ring_order import OrderWalk
from services.placement.domain.rings import Ring, RingAnswer, RingQuestion, hop_score

# Steps for all sizes together, about two seconds' worth; a size takes at most half of what is
# left, so that a hard one leaves time for the next ...
TOTAL_STEPS = 4_000_000
# ... and at least this much, enough to find an ordinary ring of any size.
LEAST_STEPS = 50_000

# Shifts a download score above any sum of memory, so that one integer orders by both.
_MEMORY_BITS = 80


@dataclass(frozen=True)
class Found:
    """The outcome of the search for rings of one size."""

    size: int
    # Best ring, from its smallest node on; None: no ring of this size passes every rule.
    ring: Ring | None
    # False when the steps ran out before everything else was ruled out.
    proven: bool
    # Rings looked at to the end.
    compared_count: int


def sizes_to_try(candidates: Candidates, model: Model, min_node_count: int) -> list[int]:
    """Return the ring sizes that the count of nodes and the model allow, ascending."""
    least = max(min_node_count, len(candidates.required), 1)
    return sizes_allowed(model, range(least, len(candidates.node_ids) + 1))


def smallest_ring(
    candidates: Candidates, model: Model, min_node_count: int, budget: Budget
) -> Found:
    """Return the best ring of the smallest size that has one; without a ring when no size has.

    `proven` False: a smaller ring, or a better one of this size, may have been missed.
    """
    proven = True
    for size in sizes_to_try(candidates, model, min_node_count):
        found = ring_of_size(candidates, model, size, budget)
        # A smaller ring that was not found is not a smaller ring that does not exist.
        proven = proven and found.proven
        if found.ring:
            return replace(found, proven=proven)
    return Found(0, None, proven, 0)


def ring_of_size(candidates: Candidates, model: Model, size: int, budget: Budget) -> Found:
    """Return the best ring of this size among those that can hold the model."""
    memory = candidates.memory_bytes
    demand = demand_of(candidates, model, size)
    return _best(
        candidates,
        demand.able,
        size,
        weight={
            n: (candidates.download_scores[n] << _MEMORY_BITS) + memory[n] for n in demand.able
        },
        needs=demand.needs,
        accept=demand.accept,
        leaves=candidates.cluster.leaves,
        budget=budget,
    )


def roomiest_ring(candidates: Candidates, size: int, budget: Budget) -> Found:
    """Return the ring of this size with the most memory, whether or not a model fits in it."""
    return _best(
        candidates,
        candidates.node_ids,
        size,
        weight=candidates.memory_bytes,
        needs=(),
        accept=lambda ring: True,
        leaves=frozenset(),
        budget=budget,
        order_matters=False,
    )


def _best(
    candidates: Candidates,
    node_ids: tuple[str, ...] | list[str],
    size: int,
    *,
    weight: Mapping[str, int],
    needs: tuple[tuple[Mapping[str, int], int], ...],
    accept: Callable[[Ring], bool],
    leaves: frozenset[str],
    budget: Budget,
    order_matters: bool = True,
) -> Found:
    graph = candidates.graph.subgraph(node_ids)
    if not candidates.required <= set(graph) or not all(
        _reachable(candidates, graph, size, amount) >= needed for amount, needed in needs
    ):
        return Found(size, None, True, 0)
    if size <= 2:
        small = [(n,) for n in graph] if size == 1 else [tuple(sorted(e)) for e in graph.edges]
        rings = [ring for ring in small if candidates.required <= set(ring)]

        def order(ring: Ring) -> tuple[bool, int, tuple[int, int], Ring]:
            total = sum(weight[node] for node in ring)
            return (leaves.isdisjoint(ring), -total, hop_score(graph, ring), ring)

        for i, ring in enumerate(sorted(rings, key=order)):
            if accept(ring):
                return Found(size, ring, True, i + 1)
        return Found(size, None, True, len(rings))

    # From three nodes on no ring holds a leaf: each node has two neighbours at least.
    steps = max(LEAST_STEPS, budget.remaining // 2)
    share = budget.part(steps)
    answers = []
    for nodes in candidates.blocks(graph):
        if len(nodes) >= size and candidates.required <= set(nodes):
            question = RingQuestion(
                graph.subgraph(nodes), size, candidates.required, weight, needs, accept
            )
            answers.append(best_ring(question, share, order_matters=order_matters))
    budget.remaining -= steps - max(0, share.remaining)
    rings = [answer.ring for answer in answers if answer.ring]
    return Found(
        size,
        min(
            rings,
            key=lambda ring: (-sum(weight[n] for n in ring), hop_score(graph, ring), ring),
            default=None,
        ),
        all(answer.proven for answer in answers),
        sum(answer.compared_count for answer in answers),
    )


def _reachable(
    candidates: Candidates, graph: nx.Graph, size: int, amount: Mapping[str, int]
) -> int:
    """Return the most that `size` nodes, the required among them, can have in sum."""
    free = sorted((amount[n] for n in graph if n not in candidates.required), reverse=True)
    held = sum(amount[node] for node in candidates.required)
    return held + sum(free[: size - len(candidates.required)])


def best_ring(question: RingQuestion, budget: Budget, *, order_matters: bool = True) -> RingAnswer:
    """Find the heaviest acceptable cycle, then the best hops, then the smallest ids in order.

    `order_matters` False: any of the heaviest cycles will do.
    """
    heaviest = HeaviestWalk(question, budget)
    proven = heaviest.run()
    if heaviest.ring is None or not order_matters:
        return RingAnswer(heaviest.ring, proven, heaviest.compared_count)
    order = OrderWalk(question, budget, heaviest.ring)
    proven = order.run() and proven
    return RingAnswer(order.ring, proven, heaviest.compared_count + order.compared_count)
