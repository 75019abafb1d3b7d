"""How many node sets of each size every rule removes, counted where that is quickly done."""

from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from math import comb

import networkx as nx

from services.placement.domain.budget import Budget
from services.placement.domain.candidates import Candidates
from services.placement.domain.model import Model
from services.placement.domain.request import PlacementRequest
from services.placement.domain.search import ring_of_size, roomiest_ring

# Sets of one size that are counted one by one at most.
MOST_SETS = 300
LARGEST_COUNTED_SIZE = 7


def removed_sets(
    candidates: Candidates, model: Model, request: PlacementRequest, size: int, budget: Budget
) -> dict[str, int] | None:
    """Return for each rule the number of node sets of this size that it was the first to remove.

    Rules in order: excluded, required, backend, not_linked, memory. Sets that pass every rule are
    not counted. None when there are too many sets to count.
    """
    node_ids = list(candidates.cluster.nodes)
    if size > LARGEST_COUNTED_SIZE or comb(len(node_ids), size) > MOST_SETS:
        return None
    removed: Counter[str] = Counter()
    for nodes in combinations(node_ids, size):
        rule = _removing_rule(candidates, model, request, nodes, budget)
        if rule:
            removed[rule] += 1
    return dict(removed)


def _removing_rule(
    candidates: Candidates,
    model: Model,
    request: PlacementRequest,
    nodes: Sequence[str],
    budget: Budget,
) -> str:
    if not request.excluded.isdisjoint(nodes):
        return "excluded"
    if not request.required <= set(nodes):
        return "required"
    if not set(candidates.node_ids).issuperset(nodes):
        return "backend"
    alone = candidates.only(nodes)
    if len(nodes) > 1 and not nx.is_connected(alone.graph):
        return "not_linked"
    if not roomiest_ring(alone, len(nodes), budget).ring:
        return "not_linked"
    if not ring_of_size(alone, model, len(nodes), budget).ring:
        return "memory"
    return ""
