"""The graph that a search walks: nodes by number, sets of nodes as the bits of one integer."""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import or_

import networkx as nx

# A cycle with fast hops leads most often to one of so many nearest neighbours.
MOST_NEAREST = 24


@dataclass(frozen=True)
class Net:
    """Nodes are numbered in the order of their ids, so that numbers compare as ids do."""

    ids: tuple[str, ...]
    number: Mapping[str, int]
    # By node: its neighbours ...
    near: tuple[int, ...]
    # ... and the hop to each, in nanoseconds.
    hops: tuple[Mapping[int, int], ...]

    @cached_property
    def rungs(self) -> tuple[list[tuple[int, int]], ...]:
        """By node: (hop, neighbour), the fastest first."""
        return tuple(sorted([(hop, other) for other, hop in row.items()]) for row in self.hops)

    @cached_property
    def nearest(self) -> tuple[list[int], ...]:
        """By node: the set of its 0, 1, 2, ... nearest neighbours, up to some number."""
        return tuple(
            list(accumulate((1 << v for _, v in own[:MOST_NEAREST]), or_, initial=0))
            for own in self.rungs
        )

    def within(self, limit: int, nodes: int) -> list[int]:
        """Return by node of a set the neighbours in it that hops up to a limit lead to."""
        near = [0] * len(self.ids)
        key = (limit, len(self.ids))
        for v in members(nodes):
            count = bisect_right(self.rungs[v], key)
            beside = self.nearest[v][min(count, MOST_NEAREST)]
            for _, other in self.rungs[v][MOST_NEAREST:count]:
                beside |= 1 << other
            near[v] = beside & nodes
        return near

    @cached_property
    def one_hop(self) -> int | None:
        """What every hop takes, where all take as long."""
        values = {hop for row in self.hops for hop in row.values()}
        return values.pop() if len(values) == 1 else None

    def mask(self, node_ids: "Sequence[str] | frozenset[str]") -> int:
        """Return the set of those of the nodes that are in the graph."""
        return sum(1 << self.number[node] for node in set(node_ids) if node in self.number)

    def named(self, ring: Sequence[int]) -> tuple[str, ...]:
        """Return the ids of some nodes, in the order given."""
        return tuple(self.ids[node] for node in ring)


def net_of(graph: nx.Graph) -> Net:
    """Return a graph whose edges carry "hop"."""
    ids = tuple(sorted(graph))
    number = {node: i for i, node in enumerate(ids)}
    hops: list[Mapping[int, int]] = [{}] * len(ids)
    for node, near in graph.adjacency():
        hops[number[node]] = {number[other]: edge["hop"] for other, edge in near.items()}
    bit = [1 << i for i in range(len(ids))]
    return Net(ids, number, tuple(sum(map(bit.__getitem__, own)) for own in hops), tuple(hops))


def members(nodes: int) -> Iterator[int]:
    """Yield the numbers of a set's nodes, ascending."""
    while nodes:
        low = nodes & -nodes
        yield low.bit_length() - 1
        nodes ^= low


def set_of(nodes: Sequence[int]) -> int:
    """Return the set of some different nodes."""
    return sum(1 << node for node in nodes)


def two_core(near: Sequence[int], nodes: int) -> int:
    """Return what is left of a set without the nodes that lack two neighbours in it."""
    doubtful = nodes
    while doubtful:
        low = doubtful & -doubtful
        doubtful ^= low
        beside = near[low.bit_length() - 1] & nodes
        if beside & (beside - 1) == 0:
            nodes ^= low
            doubtful |= beside
    return nodes


def is_dense(near: Sequence[int], nodes: int) -> bool:
    """Say whether each of three or more nodes is joined to half of them: by Dirac's theorem one
    cycle then goes through all."""
    count = nodes.bit_count()
    return count >= 3 and all(2 * (near[v] & nodes).bit_count() >= count for v in members(nodes))


def blocks(near: Sequence[int], nodes: int) -> list[int]:
    """Return the biconnected components of three and more nodes, by their smallest node.

    Every cycle lies within one of them, and every node of one lies on a cycle. By depth-first
    search (Hopcroft and Tarjan).
    """
    if is_dense(near, nodes):
        return [nodes]
    found: list[int] = []
    left = nodes
    while left:
        root = (left & -left).bit_length() - 1
        found += _blocks_from(near, nodes, root)
        left &= ~reach(near, nodes, root)
    return sorted(found, key=lambda block: (block & -block, block))


def _blocks_from(near: Sequence[int], nodes: int, root: int) -> Iterator[int]:
    depth, lowest = {root: 0}, {root: 0}
    path, waiting, seen = [root], [root], 1 << root
    while path:
        node = path[-1]
        new = near[node] & nodes & ~seen
        if new:
            child = (new & -new).bit_length() - 1
            seen |= 1 << child
            depth[child] = len(path)
            back = near[child] & seen & ~(1 << node)
            lowest[child] = min((depth[v] for v in members(back)), default=len(path))
            path.append(child)
            waiting.append(child)
            continue
        path.pop()
        if not path:
            return
        above = path[-1]
        if lowest[node] >= depth[above]:
            at = waiting.index(node)
            block = set_of(waiting[at:]) | 1 << above
            del waiting[at:]
            if block.bit_count() > 2:
                yield block
        else:
            lowest[above] = min(lowest[above], lowest[node])


def reach(near: Sequence[int], nodes: int, start: int) -> int:
    """Return the nodes of a set that paths within it lead to from one of them, that one too."""
    found = frontier = 1 << start
    while frontier:
        beside = 0
        for node in members(frontier):
            beside |= near[node]
        frontier = beside & nodes & ~found
        found |= frontier
    return found


def sides(near: Sequence[int], nodes: int) -> tuple[int, int] | None:
    """Return the two halves of a connected bipartite set, or None when it has an odd cycle."""
    first = here = nodes & -nodes
    second = 0
    while here:
        beside = 0
        for node in members(here):
            beside |= near[node]
        beside &= nodes
        if here & first:
            here, second = beside & ~second, second | beside
        else:
            here, first = beside & ~first, first | beside
        if first & second:
            return None
    return first, second
