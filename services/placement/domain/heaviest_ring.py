"""The heaviest acceptable cycle of a given length."""

from collections.abc import Sequence
from dataclasses import dataclass

from services.placement.domain.best_set import BestSet, best_set
from services.placement.domain.budget import Budget, OutOfSteps
from services.placement.domain.chance import Chance
from services.placement.domain.ears import EarSearch
from services.placement.domain.hamilton import cycle_through
from services.placement.domain.net import members, set_of, sides
from services.placement.domain.rings import RingQuestion
from services.placement.domain.walk import HeaviestWalk

# Orders of the heaviest nodes that are tried where a model does not fit in one of them.
_ORDERS = 3
# Of the steps, the part for a first exact walk: it settles what is small.
_WALK_PART = 4
# Among more nodes an exact walk that did not end at once will not end at all.
_LARGEST_WALKED = 40


@dataclass(frozen=True)
class Heaviest:
    """The outcome."""

    # None: there is none, or none was found.
    cycle: Sequence[int] | None
    weight: int
    # True when no acceptable cycle is heavier.
    proven: bool
    # Every cycle as heavy as this one has all of these nodes ...
    always: int
    # ... and beside them only some of these.
    sometimes: int
    compared_count: int


_NONE = Heaviest(None, -1, True, 0, 0, 0)


def heaviest_ring(question: RingQuestion, budget: Budget) -> Heaviest:
    """Find it: of the heaviest nodes where a cycle joins them, else by search. Raises Stopped.

    Spends no more than the budget has.
    """
    if _parity_forbids(question):
        return _NONE
    chosen = best_set(question, budget)
    if chosen is None:
        return _NONE
    cycle, tried = _joined(question, chosen, budget)
    if cycle is not None:
        weight = question.weigh(cycle)
        return Heaviest(
            cycle, weight, weight == chosen.bound, chosen.always, chosen.sometimes, tried
        )
    return _searched(question, chosen, tried, budget)


def _parity_forbids(question: RingQuestion) -> bool:
    """Say whether the nodes fall into two sides that any cycle alternates between, in vain."""
    near, nodes, size = question.net.near, question.nodes, question.size
    # Three nodes of which each is joined to most others close a triangle.
    first = nodes & -nodes
    if 2 * (near[first.bit_length() - 1] & nodes).bit_count() > nodes.bit_count():
        return False
    halves = sides(near, nodes)
    if halves is None:
        return False
    return size % 2 == 1 or any(
        half.bit_count() < size // 2 or (half & question.required).bit_count() > size // 2
        for half in halves
    )


def _joined(
    question: RingQuestion, chosen: BestSet, budget: Budget
) -> tuple[Sequence[int] | None, int]:
    """Return an acceptable cycle of the heaviest nodes if one is soon found, and how many were
    looked at."""
    near, tried = question.net.near, 0
    if chosen.nodes is None:
        return None, 0
    own = list(members(chosen.nodes))
    if any((near[v] & chosen.nodes).bit_count() < 2 for v in own):
        return None, 0
    for seed in range(_ORDERS):
        try:
            # In a mesh any order is a cycle.
            complete = all((near[v] & chosen.nodes).bit_count() == len(own) - 1 for v in own)
            if complete and seed == 0:
                budget.spend(len(own))
                cycle: Sequence[int] | None = own
            else:
                cycle = cycle_through(
                    near,
                    chosen.nodes,
                    budget,
                    Chance(seed),
                    size=len(own),
                    always=0,
                    rotations=4 * len(own),
                )
            if cycle is None:
                continue
            tried += 1
            budget.spend(8 * len(own))
        except OutOfSteps:
            break
        if question.accepts(cycle):
            return cycle, tried
    return None, tried


def _searched(question: RingQuestion, chosen: BestSet, tried: int, budget: Budget) -> Heaviest:
    """Search where the heaviest nodes are on no acceptable cycle, or on none that was found."""
    all_steps = budget.remaining
    first = budget.part(all_steps // _WALK_PART)
    walk = HeaviestWalk(question, first, -1)
    proven, found, best = walk.run(), walk.found, walk.best
    tried += walk.compared_count
    budget.take_back(first, all_steps // _WALK_PART)
    if not proven and best < chosen.bound:
        large = question.nodes.bit_count() > _LARGEST_WALKED
        steps = budget.remaining if large else budget.remaining // 2
        second = budget.part(steps)
        ears = EarSearch(question, second, best, chosen.bound)
        ears.run()
        tried += ears.compared_count
        budget.take_back(second, steps)
        if ears.found is not None:
            found, best = ears.found, ears.best
        if best < chosen.bound and not large:
            walk = HeaviestWalk(question, budget, best)
            proven = walk.run()
            found, best = walk.found or found, walk.best
            tried += walk.compared_count
    if found is None:
        return Heaviest(None, -1, proven, 0, 0, tried)
    proven = proven or best == chosen.bound
    always, sometimes = question.required, _possible(question, best)
    if best == chosen.bound:
        always, sometimes = chosen.always, chosen.sometimes
    return Heaviest(found, best, proven, always, sometimes & ~always, tried)


def _possible(question: RingQuestion, weight: int) -> int:
    """Return the nodes that can be on a cycle of some weight for all that their own weight says."""
    required = question.required
    free = sorted((question.weight[v] for v in members(question.nodes & ~required)), reverse=True)
    slots = question.size - required.bit_count()
    if slots == 0:
        return 0
    others = sum(question.weight[v] for v in members(required)) + sum(free[: slots - 1])
    able = [v for v in members(question.nodes) if others + question.weight[v] >= weight]
    return set_of(able) & ~required
