"""Among cycles of a known weight, the one with the fastest slowest hop, then the best sum."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from services.placement.domain.budget import Budget, OutOfSteps
from services.placement.domain.chance import Chance
from services.placement.domain.hamilton import cycle_through
from services.placement.domain.heaviest_ring import Heaviest
from services.placement.domain.ladder import Ladder
from services.placement.domain.net import is_dense, members, set_of, two_core
from services.placement.domain.order_walk import Field, OrderWalk
from services.placement.domain.rings import RingQuestion, canonical, cycle_hops
from services.placement.domain.shorter import exchanged, shorter

# Steps for a good order before anything is proven, and more of them for each node.
FIRST_STEPS = 4_000
FIRST_STEPS_BY_NODE = 64
# In a mesh a ring of more nodes than this has more orders than an exact walk can rule out soon; it
# then gets so many steps.
SMALL_SIZE = 16
HARD_STEPS = 2_000
# With so many neighbours each, some nodes are on a cycle that is soon found.
_WAYS = 8


@dataclass(frozen=True)
class Ordered:
    """The outcome."""

    # Acceptable; starts at its smallest node.
    cycle: tuple[int, ...]
    # True when no acceptable cycle of this weight has better hops.
    proven: bool
    compared_count: int


def best_order(question: RingQuestion, known: Heaviest, budget: Budget) -> Ordered:
    """Find it. `known` holds a cycle. Raises Stopped; spends no more than the budget has."""
    assert known.cycle is not None
    nodes = known.always | known.sometimes
    try:
        budget.spend(4 * nodes.bit_count())
    except OutOfSteps:
        return Ordered(canonical(known.cycle), False, 0)
    simplest = _simplest(question, known)
    if simplest is not None:
        return Ordered(simplest, True, 1)
    return _Order(question, known, budget).best()


def _simplest(question: RingQuestion, known: Heaviest) -> tuple[int, ...] | None:
    """Return the cycle with the smallest ids, where any order is a cycle and all hops are equal."""
    net, nodes = question.net, known.always | known.sometimes
    count = nodes.bit_count()
    own = list(members(nodes))
    if any((net.near[v] & nodes).bit_count() < count - 1 for v in own):
        return None
    if net.one_hop is None:
        hop = net.hops[own[0]][own[1]]
        if any(net.hops[v][u] != hop for v in own for u in own if u != v):
            return None
    slots = question.size - known.always.bit_count()
    spare = list(members(known.sometimes))[:slots]
    cycle = tuple(members(known.always | set_of(spare)))
    good = question.weigh(cycle) == known.weight and question.accepts(cycle)
    return cycle if good else None


class _Order:
    """One such search."""

    def __init__(self, question: RingQuestion, known: Heaviest, budget: Budget) -> None:
        self.question, self.known, self.budget = question, known, budget
        assert known.cycle is not None
        self.cycle: list[int] = list(known.cycle)
        self.hops = question.net.hops
        self.score = cycle_hops(self.hops, self.cycle)
        self.compared_count = 0
        weights = {question.weight[v] for v in members(known.sometimes)}
        slots = question.size - known.always.bit_count()
        always_weight = sum(question.weight[v] for v in members(known.always))
        # Any so many of the nodes that some have make the weight.
        self.interchangeable = not known.sometimes or (
            len(weights) == 1 and always_weight + slots * max(weights) == known.weight
        )

    def best(self) -> Ordered:
        known, size = self.known, self.question.size
        ladder = Ladder(self.question.net, known.always | known.sometimes)
        wished = FIRST_STEPS + FIRST_STEPS_BY_NODE * ladder.nodes.bit_count()
        thorough = self.budget.remaining >= wished
        least = ladder.least_slowest(known.always, size, thorough=thorough)
        first_steps = min(wished, self.budget.remaining)
        whole, self.budget = self.budget, self.budget.part(first_steps)
        self._faster_slowest(ladder, least)
        self._smaller_sum(ladder)
        whole.take_back(self.budget, first_steps)
        hard = is_dense(self.question.net.near, ladder.nodes) and size > SMALL_SIZE
        if hard and whole.remaining < HARD_STEPS:
            return Ordered(canonical(self.cycle), False, self.compared_count)
        slowest = self.score[0]
        near = ladder.within(slowest)
        core = two_core(near, ladder.nodes)
        rungs = {v: ladder.up_to(v, slowest, core) for v in members(core)}
        field = Field(known.always, known.sometimes & core, known.weight, near, rungs, least)
        steps = min(whole.remaining, HARD_STEPS if hard else whole.remaining)
        part = whole.part(steps)
        walk = OrderWalk(self.question, field, self.score, part)
        proven = self.score == (least, walk.least_sum)
        proven = walk.run() or proven
        whole.take_back(part, steps)
        return Ordered(
            walk.cycle or canonical(self.cycle),
            proven,
            self.compared_count + walk.compared_count,
        )

    def _keep(self, cycle: Sequence[int]) -> bool:
        """Keep a cycle with better hops if it is acceptable."""
        score = cycle_hops(self.hops, cycle)
        if score >= self.score:
            return False
        self.compared_count += 1
        if not self.question.accepts(cycle):
            return False
        self.cycle, self.score = list(cycle), score
        return True

    def _faster_slowest(self, ladder: Ladder, least: int) -> None:
        """Try a slowest hop that surely leaves enough ways, then the least possible, then between.

        The steps allow a few tries only, so the first has to succeed.
        """
        values = [value for value in ladder.values() if least <= value < self.score[0]]
        if not values:
            return
        low, high = 0, _WAYS * ladder.nodes.bit_count() // 2
        while high < len(values) - 1 and not self._with_slowest(ladder, values[high]):
            low, high = high, 2 * high
        high = min(high, len(values))
        if self._with_slowest(ladder, values[0]):
            return
        while high - low > 1 and self.budget.remaining >= self._least_steps(ladder):
            middle = (low + high) // 2
            if self._with_slowest(ladder, values[middle]):
                # It may be faster than was allowed.
                high = min(middle, bisect_left(values, self.score[0]))
            else:
                low = middle

    def _least_steps(self, ladder: Ladder) -> int:
        """Return what a look for a cycle takes at least."""
        return 16 * ladder.nodes.bit_count()

    def _with_slowest(self, ladder: Ladder, limit: int) -> bool:
        """Look for a cycle with hops up to a limit; keep it and say so."""
        known, size = self.known, self.question.size
        steps = self.budget.remaining // 3
        part = self.budget.part(steps)
        cycle: list[int] | None = None
        try:
            part.spend(8 * ladder.nodes.bit_count())
            near, block = ladder.within(limit), set_of(self.cycle)
            if self.interchangeable:
                block = ladder.component(limit, known.always, size)
            if block:
                cycle = cycle_through(
                    near,
                    block,
                    part,
                    Chance(1),
                    size=size,
                    always=known.always if self.interchangeable else 0,
                    rotations=6 * size,
                )
        except OutOfSteps:
            pass
        self.budget.take_back(part, steps)
        return cycle is not None and self._keep(cycle)

    def _smaller_sum(self, ladder: Ladder) -> None:
        """Exchange hops, and nodes where others would do as well, while that helps."""
        limit, cycle, total = self.score[0], self.cycle, self.score[1]
        spare = self.known.sometimes if self.interchangeable else 0
        found = []
        while self.budget.remaining >= self._least_steps(ladder):
            # What is made of the ladder for it takes steps too.
            steps = self.budget.remaining // 2
            part = self.budget.part(steps - 8 * len(cycle))
            on = set_of(cycle)
            rungs = {v: ladder.up_to(v, limit, on) for v in cycle}
            cycle = shorter(cycle, self.hops, rungs, limit, part)
            if spare:
                cycle = exchanged(cycle, self.hops, ladder.within(limit), spare, part)
            self.budget.take_back(part, steps)
            before, total = total, cycle_hops(self.hops, cycle)[1]
            if total >= before:
                break
            found.append(cycle)
            if not spare:
                break
        # A model may not fit in the best order, but in one on the way to it.
        while found and not self._keep(found.pop()):
            pass
