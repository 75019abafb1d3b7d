"""Cycles of a given length in a sparse graph, by exchanging stretches of a cycle for detours.

An ear is a path between two nodes of a cycle through nodes that are not on it. Put in place of the
stretch between these two it makes the cycle longer or shorter, heavier or lighter. Exchanges lead
to the length asked for and then to more weight; when none helps any more, a node from outside is
joined by force, and they go on from there.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import accumulate

from services.placement.domain.budget import Budget, OutOfSteps
from services.placement.domain.chance import Chance
from services.placement.domain.hamilton import cycle_through
from services.placement.domain.net import members, set_of
from services.placement.domain.rings import RingQuestion

# Longest ears that are tried one by one.
_MOST_OUTSIDE = 3


class EarSearch:
    """Looks for the heaviest acceptable cycle; proves nothing."""

    def __init__(self, question: RingQuestion, budget: Budget, best: int, enough: int) -> None:
        """Cycles of `best` or less are of no use, one of `enough` ends the search."""
        self.question, self.budget, self.best, self.enough = question, budget, best, enough
        self.near, self.nodes, self.weight = question.net.near, question.nodes, question.weight
        self.chance = Chance(question.size)
        self.found: list[int] | None = None
        self.compared_count = 0

    def run(self) -> None:
        """Search until there is enough or the steps run out. Raises Stopped."""
        outside = list(members(self.nodes))
        try:
            cycle = self._start()
            if cycle is None:
                return
            cycle = self._settle(cycle)
            while not self._take(cycle):
                node = self.chance.choice(outside)
                if self.chance.below(2):
                    node = max(node, self.chance.choice(outside), key=self.weight.__getitem__)
                kicked = self._join(cycle, node)
                if kicked is None:
                    self.budget.spend(1)
                    continue
                other = self._settle(kicked)
                if self._rank(other) >= self._rank(cycle) or self.chance.below(10) == 0:
                    cycle = other
        except OutOfSteps:
            pass

    def _rank(self, cycle: list[int]) -> tuple[int, int]:
        return -abs(len(cycle) - self.question.size), self.question.weigh(cycle)

    def _take(self, cycle: list[int]) -> bool:
        """Keep a cycle if it is the best so far; say whether there is enough now."""
        if len(cycle) != self.question.size:
            return False
        weight = self.question.weigh(cycle)
        if weight > self.best and self.question.required & ~set_of(cycle) == 0:
            self.compared_count += 1
            self.budget.spend(8 * len(cycle))
            if self.question.accepts(cycle):
                self.found, self.best = cycle, weight
        return self.found is not None and self.best >= self.enough

    def _start(self) -> list[int] | None:
        """Return a cycle with all required nodes, if it is easily made."""
        if 2 * self.question.size > self.nodes.bit_count():
            long = self._long()
            if long is not None:
                return long
        required = list(members(self.question.required))
        root = required[0] if required else max(members(self.nodes), key=self.weight.__getitem__)
        beside = next(members(self.near[root] & self.nodes))
        self.budget.spend(4 * self.nodes.bit_count())
        # Not straight back over the edge it began with.
        ends = self.near[root] & self.nodes & ~(1 << beside)
        way = _shortest(self.near, self.nodes & ~(1 << root), beside, ends)
        cycle = [root, *way] if way else None
        for node in required[1:]:
            if cycle is None:
                return None
            if node not in cycle:
                cycle = self._join(cycle, node)
        return cycle

    def _long(self) -> list[int] | None:
        """Return a cycle of the length asked for, by rotations: exchanges get stuck before it."""
        steps = self.budget.remaining // 2
        part = self.budget.part(steps)
        cycle: list[int] | None = None
        with suppress(OutOfSteps):
            cycle = cycle_through(
                self.near,
                self.nodes,
                part,
                self.chance,
                size=self.question.size,
                always=self.question.required,
                rotations=steps,
            )
        self.budget.take_back(part, steps)
        return cycle

    def _join(self, cycle: list[int], node: int) -> list[int] | None:
        """Return the cycle led through a node: two ways from it, and the better stretch dropped."""
        on = set_of(cycle)
        if on >> node & 1:
            return None
        self.budget.spend(4 * self.nodes.bit_count())
        first = _shortest(self.near, self.nodes, node, on)
        if first is None:
            return None
        others = self.nodes & ~set_of(first) | 1 << node
        second = _shortest(self.near, others, node, on & ~(1 << first[-1]))
        if second is None:
            return None
        ear = [*reversed(first[1:-1]), *second[:-1]]
        at = cycle.index(first[-1])
        turned = cycle[at:] + cycle[:at]
        to = turned.index(second[-1])
        # Over the ear from the first to the second, and on; or back from the second.
        ways = [
            [turned[0], *ear, *turned[to:]],
            [turned[0], *ear, *reversed(turned[1 : to + 1])],
        ]
        kept = self.question.required & on
        good = [way for way in ways if len(way) > 2 and kept & ~set_of(way) == 0]
        return min(good, key=lambda way: abs(len(way) - self.question.size), default=None)

    def _settle(self, cycle: list[int]) -> list[int]:
        """Exchange stretches until no exchange helps."""
        if self.question.size == self.nodes.bit_count() and len(cycle) == self.question.size:
            return cycle
        unchanged, at = 0, 0
        while unchanged < len(cycle):
            at = at % len(cycle)
            turned = cycle[at:] + cycle[:at]
            better = self._exchange(turned)
            if better is None:
                unchanged, at = unchanged + 1, at + 1
            else:
                cycle, unchanged, at = better, 0, 0
        return cycle

    def _exchange(self, cycle: list[int]) -> list[int] | None:
        """Return the cycle with the best of the ears from its first node that helps."""
        size, count, weight = self.question.size, len(cycle), self.weight
        before = list(accumulate((weight[v] for v in cycle), initial=0))
        place = {v: i for i, v in enumerate(cycle)}
        # The first required node behind the start: a stretch must end there at the latest.
        last = next((i for i in range(1, count) if self.question.required >> cycle[i] & 1), count)
        best, chosen = (-abs(count - size), 0), None
        for ear, end in self._ears(cycle[0], set_of(cycle)):
            # The cycle may also be walked the other way; that is tried from the other end.
            to = place[end]
            longer = count - (to - 1) + len(ear)
            if to > last or longer < 3:
                continue
            if count != size and abs(longer - size) >= abs(count - size):
                continue
            gained = sum(weight[v] for v in ear) - (before[to] - before[1])
            rank = (-abs(longer - size), gained)
            if rank > best:
                best, chosen = rank, [cycle[0], *ear, *cycle[to:]]
        self.budget.spend(count // 2)
        return chosen

    def _ears(self, start: int, on: int) -> Iterator[tuple[Sequence[int], int]]:
        near, outside = self.near, self.nodes & ~on
        waiting: list[tuple[tuple[int, ...], int]] = [((), start)]
        while waiting:
            ear, end = waiting.pop()
            homes = near[end] & on & ~(1 << start)
            self.budget.spend(2 + homes.bit_count())
            for home in members(homes):
                yield ear, home
            if len(ear) < _MOST_OUTSIDE:
                for node in members(near[end] & outside):
                    if node not in ear:
                        waiting.append(((*ear, node), node))


def _shortest(near: Sequence[int], nodes: int, start: int, goals: int) -> list[int] | None:
    """Return a shortest path within a set from a node to another that is one of the goals."""
    came: dict[int, int] = {}
    seen, frontier = 1 << start, [start]
    while frontier:
        following = []
        for node in frontier:
            for other in members(near[node] & nodes & ~seen):
                seen |= 1 << other
                came[other] = node
                if goals >> other & 1:
                    path = [other]
                    while path[-1] != start:
                        path.append(came[path[-1]])
                    return path[::-1]
                following.append(other)
        frontier = following
    return None
