"""The heaviest set of nodes that has what a ring needs, whether or not a cycle joins it.

No ring weighs more, and in a mesh every set is a ring. Without a need that binds these are the
heaviest nodes; with one it is a knapsack: a Lagrange multiplier turns the need into a price, which
gives a bound, and a search through the sets above that bound settles it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from services.placement.domain.budget import Budget
from services.placement.domain.net import members, set_of
from services.placement.domain.rings import RingQuestion
from services.placement.domain.swaps import Swaps


@dataclass(frozen=True)
class BestSet:
    """The outcome."""

    # No set that has what is needed weighs more.
    bound: int
    # The heaviest set found; None: none was.
    nodes: int | None
    # Every set that weighs as much as `bound` has all of these ...
    always: int
    # ... and beside them only some of these.
    sometimes: int


def best_set(question: RingQuestion, budget: Budget) -> BestSet | None:
    """Return the heaviest set; None when no set has what is needed.

    Of nodes that weigh the same those with the smaller numbers are taken. Raises Stopped.
    """
    weight = question.weight
    slots = question.size - question.required.bit_count()
    free = list(members(question.nodes & ~question.required))
    if slots < 0 or len(free) < slots:
        return None
    budget.spend(len(free))
    free.sort(key=lambda v: -weight[v])
    chosen = set_of(free[:slots]) | question.required
    total = sum(weight[v] for v in members(chosen))
    short = [need for need in question.needs if _amount(need[0], chosen) < need[1]]
    if not short:
        least = weight[free[slots - 1]] if slots else -1
        equal = set_of([v for v in free if weight[v] == least])
        spare = 0 if equal & ~chosen == 0 else equal
        return BestSet(total, chosen, chosen & ~spare, spare)
    held = list(members(question.required))
    for amount, needed in question.needs:
        most = sum(sorted((amount[v] for v in free), reverse=True)[:slots])
        if sum(amount[v] for v in held) + most < needed:
            return None

    def tightness(need: tuple[Sequence[int], int]) -> Fraction:
        amount, needed = need
        have = _amount(amount, chosen)
        most = sum(sorted((amount[v] for v in free), reverse=True)[:slots])
        return Fraction(needed - have, sum(amount[v] for v in held) + most - have)

    return _priced(question, free, slots, max(short, key=tightness), budget)


def _amount(amount: Sequence[int], nodes: int) -> int:
    return sum(amount[v] for v in members(nodes))


def _priced(
    question: RingQuestion,
    free: list[int],
    slots: int,
    need: tuple[Sequence[int], int],
    budget: Budget,
) -> BestSet | None:
    amount, weight = need[0], question.weight
    held = list(members(question.required))
    needed = need[1] - sum(amount[v] for v in held)
    own = sum(weight[v] for v in held)

    def sums(nodes: Sequence[int]) -> tuple[int, int]:
        return sum(weight[v] for v in nodes), sum(amount[v] for v in nodes)

    heavy = free[:slots]
    most = ample = sorted(free, key=lambda v: (-amount[v], -weight[v], v))[:slots]
    # The price of the need, a fraction: where the lines of two sets cross, until none lies above.
    while True:
        (heavy_weight, heavy_amount), (ample_weight, ample_amount) = sums(heavy), sums(ample)
        times, price = ample_amount - heavy_amount, heavy_weight - ample_weight
        value = {v: times * weight[v] + price * amount[v] for v in free}
        ranked = sorted(free, key=lambda v: (-value[v], v))
        budget.spend(2 * len(free))
        top = ranked[:slots]
        new_weight, new_amount = sums(top)
        if times * new_weight + price * new_amount <= times * heavy_weight + price * heavy_amount:
            break
        if new_amount < needed:
            heavy = top
        else:
            ample = top
    swaps = Swaps(
        question,
        ranked,
        value,
        top=top,
        scale=times,
        limit=sum(value[v] for v in top) - price * needed + times * own,
    )
    for nodes in (most, ample):
        swaps.look_at(set_of(nodes) | question.required)
    proven = swaps.run(budget)
    if swaps.nodes is None:
        bound = swaps.limit // times
        return None if proven else BestSet(bound, None, question.required, set_of(free))
    if proven and swaps.count == 1:
        return BestSet(swaps.best, swaps.nodes, swaps.nodes, 0)
    bound = swaps.best if proven else max(swaps.limit // times, swaps.best)
    return BestSet(bound, swaps.nodes, question.required, set_of(free))
