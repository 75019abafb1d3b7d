"""All cycles of a known weight, in the order of their ids: exact, and long where there are many."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from services.placement.domain.budget import Budget, OutOfSteps
from services.placement.domain.least_hops import Potentials, best_potentials
from services.placement.domain.net import members, reach
from services.placement.domain.rings import RingQuestion
from services.placement.domain.walk import LARGEST_SIZE

# With fewer steps than this nothing can be proven that needs potentials.
_LEAST_FOR_POTENTIALS = 1_000


@dataclass(frozen=True)
class Field:
    """Among which cycles one is to be the best."""

    # Nodes that all of them have, and nodes that any of them may have beside.
    always: int
    sometimes: int
    weight: int
    # By node: its neighbours by hops no slower than the slowest hop that is allowed ...
    near: Sequence[int]
    # ... and those hops, (hop, neighbour), the fastest first.
    rungs: Mapping[int, Sequence[tuple[int, int]]]
    # No cycle has a faster slowest hop.
    least_slowest: int


class OrderWalk:
    """Finds, among acceptable cycles of a known weight, the best hops, then the smallest ids.

    Paths start at the cycle's smallest node and neighbours are tried in the order of ids, so of
    equally good cycles the first found is the one to keep.
    """

    def __init__(
        self, question: RingQuestion, field: Field, score: tuple[int, int], budget: Budget
    ) -> None:
        """`score`: slowest hop and sum of hops of a cycle that is known."""
        self.question, self.field, self.budget = question, field, budget
        self.score, self.cycle = score, tuple[int, ...]()
        self.compared_count = 0
        self.nodes = field.always | field.sometimes
        self.near = [beside & self.nodes for beside in field.near]
        # Every cycle has the same nodes, or the potentials would prove nothing.
        fixed = field.always.bit_count() == question.size
        own = {v: field.rungs[v] for v in members(self.nodes)}
        self.potentials = (
            best_potentials(own, budget)
            if fixed and budget.remaining > _LEAST_FOR_POTENTIALS
            else _without_potentials(own)
        )
        self.shift = 2 * sum(self.potentials.of.values())
        self.fixed = fixed
        # Where it is the same for all of them, any of them will do.
        spare = {question.weight[v] for v in members(field.sometimes)}
        self.spare_weight = max(spare, default=0) if len(spare) < 2 else None
        # Twice the least that so many nodes add.
        self.least = list(accumulate(sorted(self.potentials.two.values()), initial=0))

    @property
    def least_sum(self) -> int:
        """No cycle has a smaller sum of hops."""
        if self.fixed:
            return -(-self.potentials.twice_bound // 2)
        two = self.potentials.two
        others = sorted(two[v] for v in members(self.field.sometimes))
        slots = self.question.size - self.field.always.bit_count()
        twice = sum(two[v] for v in members(self.field.always)) + sum(others[:slots])
        return -(-twice // 2)

    def run(self) -> bool:
        """Walk from every start; return False when that was not done to the end."""
        size = self.question.size
        if size > LARGEST_SIZE:
            return False
        own = list(members(self.nodes))
        try:
            for i, start in enumerate(own[: len(own) - size + 1]):
                self.allowed = self.nodes >> start << start
                if self.field.always & ~self.allowed:
                    break
                self.budget.spend(1 + i // 8)
                self._within(start)
                two = self.potentials.two
                rest = sum(two.values()) - two[start] if self.fixed else 0
                self._extend([start], 1 << start, 0, 0, rest)
        except OutOfSteps:
            return False
        return True

    def _within(self, start: int) -> None:
        # Layer d: the nodes within d steps of the start.
        self.within = [1 << start]
        while len(self.within) <= self.question.size:
            wider = nearer = self.within[-1]
            for node in members(nearer):
                wider |= self.near[node]
            self.within.append(wider & self.allowed)
            if self.within[-1] == nearer:
                self.within += [nearer] * (self.question.size + 1 - len(self.within))

    def _hopeless(self, slowest: int, total: int, rest: int, last: int, first: int) -> bool:
        """Say whether no cycle over this path can be better. `total`: with potentials; `rest`:
        twice the least that is still to be added beside the two ends' other hops."""
        one = self.potentials.one
        least = 2 * total + rest + one[last] + one[first]
        bound = (max(slowest, self.field.least_slowest), -(-least // 2) - self.shift)
        return bound >= self.score if self.cycle else bound > self.score

    def _extend(self, path: list[int], on_path: int, slowest: int, total: int, rest: int) -> None:
        size, last, first = self.question.size, path[-1], path[0]
        left = size - len(path)
        if left == 0:
            self._close(path, slowest, total)
            return
        self.budget.spend(8 + size // 4 + self.nodes.bit_count() // 8)
        open_to = reach(self.near, self.allowed & ~on_path | 1 << last, last)
        to_come = self.field.always & ~on_path
        slots = left - to_come.bit_count()
        if to_come & ~open_to or slots < 0 or not self._heavy_enough(on_path, open_to, slots):
            return
        hops, of, two = self.question.net.hops, self.potentials.of, self.potentials.two
        joining = self.near[last] & open_to & ~on_path & self.within[left]
        for node in members(joining if slots else joining & to_come):
            hop = hops[last][node]
            slower, longer = max(slowest, hop), total + hop + of[last] + of[node]
            less = rest - two[node] if self.fixed else self.least[left - 1]
            if not self._hopeless(slower, longer, less, node, first):
                self._extend([*path, node], on_path | 1 << node, slower, longer, less)

    def _heavy_enough(self, on_path: int, open_to: int, slots: int) -> bool:
        free = open_to & self.field.sometimes & ~on_path
        if free.bit_count() < slots:
            return False
        if self.spare_weight is not None:
            return True
        weight = self.question.weight
        have = sum(weight[v] for v in members(on_path | self.field.always))
        most = sorted((weight[v] for v in members(free)), reverse=True)[:slots]
        return have + sum(most) >= self.field.weight

    def _close(self, path: list[int], slowest: int, total: int) -> None:
        first, last = path[0], path[-1]
        # Each cycle in one of its two directions only.
        if not self.near[last] >> first & 1 or path[1] > last:
            return
        if self.question.weigh(path) != self.field.weight:
            return
        self.compared_count += 1
        self.budget.spend(8 * len(path))
        hop, of = self.question.net.hops[last][first], self.potentials.of
        score = (max(slowest, hop), total + hop + of[last] + of[first] - self.shift)
        worse = score >= self.score if self.cycle else score > self.score
        if not worse and self.question.accepts(path):
            self.cycle, self.score = tuple(path), score


def _without_potentials(rungs: Mapping[int, Sequence[tuple[int, int]]]) -> Potentials:
    return Potentials(
        dict.fromkeys(rungs, 0),
        {v: own[0][0] + own[1][0] for v, own in rungs.items()},
        {v: own[0][0] for v, own in rungs.items()},
    )
