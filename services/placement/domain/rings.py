"""Rings of three and more nodes: simple cycles of a graph, what is asked of one, how they compare.

The best one is found without listing all. `heaviest_ring` finds the heaviest acceptable cycle,
`ring_order` among cycles of that weight the one with the best hops. Both begin with what is quickly
found, compare it with a bound that nothing can exceed, and search exactly only where these differ.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import networkx as nx

from services.placement.domain.net import Net

Ring = tuple[str, ...]


@dataclass(frozen=True)
class RingQuestion:
    """Which cycle is asked for."""

    net: Net
    # The nodes it may hold: as a set of `net`, biconnected, so that each lies on some cycle.
    nodes: int
    # At least 3.
    size: int
    # Among `nodes`; the cycle holds all of them.
    required: int
    # What is to be largest in sum, by node. At least 0.
    weight: Sequence[int]
    # Each pair: an amount by node, and what the cycle's nodes must have of it in sum.
    needs: Sequence[tuple[Sequence[int], int]]
    # Whether a cycle will do, asked last.
    accept: Callable[[Ring], bool]

    def accepts(self, cycle: Sequence[int]) -> bool:
        """Say whether a cycle will do."""
        for amount, needed in self.needs:
            if sum(map(amount.__getitem__, cycle)) < needed:
                return False
        return self.accept(self.net.named(canonical(cycle)))

    def weigh(self, cycle: Sequence[int]) -> int:
        """Return the weight of a cycle."""
        return sum(map(self.weight.__getitem__, cycle))


def canonical(cycle: Sequence[int]) -> tuple[int, ...]:
    """Turn and mirror a cycle so that it starts at its smallest node, then the smaller next."""
    at = cycle.index(min(cycle))
    turned = (*cycle[at:], *cycle[:at])
    return turned if turned[1] <= turned[-1] else (turned[0], *reversed(turned[1:]))


def cycle_hops(hops: Sequence[Mapping[int, int]], cycle: Sequence[int]) -> tuple[int, int]:
    """Return the slowest hop and the sum of hops of a cycle, in nanoseconds."""
    each = [hops[a][b] for a, b in zip(cycle, (*cycle[1:], cycle[0]), strict=True)]
    return max(each), sum(each)


def hop_score(graph: nx.Graph, ring: Ring) -> tuple[int, int]:
    """Return the slowest hop and the sum of hops of a ring, in nanoseconds; (0, 0) for one node."""
    pairs = list(pairwise((*ring, ring[0]))) if len(ring) > 2 else list(pairwise(ring))
    hops = [graph.edges[pair]["hop"] for pair in pairs]
    return (max(hops, default=0), sum(hops))
