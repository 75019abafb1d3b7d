"""Hops by speed: which neighbours a node has when slower ones are left out, and bounds from it."""

from bisect import bisect_right
from collections.abc import Callable, Sequence

from services.placement.domain.net import MOST_NEAREST, Net, blocks, members

Rung = tuple[int, int]


class Ladder:
    """The hops between some nodes."""

    def __init__(self, net: Net, nodes: int) -> None:
        """Takes the hops between the nodes of a set."""
        self.nodes, self._net, self._node_count = nodes, net, len(net.ids)
        self._within: dict[int, list[int]] = {}
        # By node: (hop, other), the fastest first.
        self.rungs: dict[int, list[Rung]] = {}
        for v in members(nodes):
            rungs = net.rungs[v]
            if net.near[v] & ~nodes:
                rungs = [rung for rung in rungs if nodes >> rung[1] & 1]
            self.rungs[v] = rungs

    def values(self, most: int = MOST_NEAREST) -> list[int]:
        """Return the hops to every node's nearest neighbours, so many of them, ascending."""
        return sorted({hop for rungs in self.rungs.values() for hop, _ in rungs[:most]})

    def up_to(self, node: int, limit: int, others: int) -> list[Rung]:
        """Return a node's hops up to a limit to some of the others."""
        rungs = self.rungs[node]
        rungs = rungs[: bisect_right(rungs, (limit, self._node_count))]
        if self.nodes & ~others:
            rungs = [rung for rung in rungs if others >> rung[1] & 1]
        return rungs

    def within(self, limit: int) -> list[int]:
        """Return by node the neighbours that hops up to a limit lead to."""
        if limit not in self._within:
            self._within[limit] = self._net.within(limit, self.nodes)
        return self._within[limit]

    def least_slowest(self, always: int, size: int, *, thorough: bool) -> int:
        """Return a bound: no cycle of some size through these nodes has a faster slowest hop.

        There must be one. Each node of a cycle has two hops no slower than its slowest; and, which
        is looked at if `thorough`, a cycle lies within a biconnected component.
        """
        second = {v: rungs[1][0] for v, rungs in self.rungs.items() if len(rungs) > 1}
        bound = sorted(second.values())[size - 1]
        bound = max([bound, *(second[v] for v in members(always))])

        def possible(limit: int) -> bool:
            return self.component(limit, always, size) != 0

        if not thorough or possible(bound):
            return bound
        values = self.values()
        if not possible(values[-1]):
            values = self.values(self._node_count)
        return _least([value for value in values if value > bound], possible)

    def component(self, limit: int, always: int, size: int) -> int:
        """Return a biconnected component that such a cycle may lie in, hops up to a limit; or 0."""
        for block in blocks(self.within(limit), self.nodes):
            if block.bit_count() >= size and always & ~block == 0:
                return block
        return 0


def _least(values: Sequence[int], possible: Callable[[int], bool]) -> int:
    """Return the least value that is possible, as all above it are; the last one is."""
    low, high = -1, 0
    while high < len(values) - 1 and not possible(values[high]):
        low, high = high, min(2 * high + 1, len(values) - 1)
    while high - low > 1:
        middle = (low + high) // 2
        if possible(values[middle]):
            high = middle
        else:
            low = middle
    return values[high]
