"""Rings of three and more nodes: simple cycles of a graph, what is asked of one, how they compare.

The best one is found without listing all, by two branch-and-bound walks over paths:
`heaviest_ring` finds the heaviest acceptable cycle, giving a path up when even the heaviest nodes
that are left cannot lift it above the best found; `ring_order` finds, among cycles of that weight,
the one with the best hops. Both are exact unless the steps run out, which they say.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import networkx as nx

Ring = tuple[str, ...]


@dataclass(frozen=True)
class RingQuestion:
    """Which cycle is asked for."""

    # Biconnected, so that every node lies on some cycle. Edges carry "hop".
    graph: nx.Graph
    size: int
    # In the graph; the cycle holds all of them.
    required: frozenset[str]
    # What is to be largest in sum, by node. At least 0.
    weight: Mapping[str, int]
    # Each pair: an amount by node, and what the cycle's nodes must have of it in sum.
    needs: Sequence[tuple[Mapping[str, int], int]]
    # Whether a cycle will do, asked last.
    accept: Callable[[Ring], bool]


@dataclass(frozen=True)
class RingAnswer:
    """The best cycle: starts at its smallest node, goes on to the smaller of its neighbours."""

    # None: there is no such cycle, or none was found in the given steps.
    ring: Ring | None
    # True when the budget sufficed to rule out everything else.
    proven: bool
    # Cycles that were looked at to the end.
    compared_count: int


def canonical(ring: Sequence[str]) -> Ring:
    """Turn and mirror a cycle so that it starts at its smallest node, then the smaller next."""
    at = ring.index(min(ring))
    turned = (*ring[at:], *ring[:at])
    mirrored = (turned[0], *reversed(turned[1:]))
    return min(turned, mirrored)


def hop_score(graph: nx.Graph, ring: Ring) -> tuple[int, int]:
    """Return the slowest hop and the sum of hops of a ring, in nanoseconds; (0, 0) for one node."""
    pairs = list(pairwise((*ring, ring[0]))) if len(ring) > 2 else list(pairwise(ring))
    hops = [graph.edges[pair]["hop"] for pair in pairs]
    return (max(hops, default=0), sum(hops))
