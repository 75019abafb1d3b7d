"""Sets near the best one that a price allows: which of their swaps has what is needed, and is best.

The nodes that are worth most at that price make the bound, but may not have what is needed. Any
other set comes from these by dropping some and adding as many, and each such change loses the
difference of its worth from that of the last node in. So only changes need looking at whose losses
are in sum below what the best set found so far is short of the bound; small changes come first.
"""

from collections.abc import Mapping, Sequence

from services.placement.domain.budget import Budget, OutOfSteps
from services.placement.domain.net import members, set_of
from services.placement.domain.rings import RingQuestion

# Most steps: a knapsack of many nodes has no end.
MOST_STEPS = 8_000


class Swaps:
    """One such search."""

    def __init__(
        self,
        question: RingQuestion,
        ranked: Sequence[int],
        value: Mapping[int, int],
        *,
        top: Sequence[int],
        scale: int,
        limit: int,
    ) -> None:
        """`limit`: no set is worth more; worth is weight times `scale`."""
        self.question, self.scale, self.limit = question, scale, limit
        self.base = set_of(top) | question.required
        border = value[top[-1]]
        held = set(top)
        # (Loss, node, whether it is dropped), small losses first.
        self.changes = sorted((abs(value[v] - border), v, v in held) for v in ranked)
        self.best, self.count = -1, 0
        self.nodes: int | None = None

    def look_at(self, nodes: int) -> None:
        """Keep a set if it has what is needed and none better was seen."""
        total = self._sum(self.question.weight, nodes)
        if total < self.best:
            return
        if any(self._sum(amount, nodes) < needed for amount, needed in self.question.needs):
            return
        if total > self.best:
            self.best, self.nodes, self.count = total, nodes, 1
        elif nodes != self.nodes:
            self.count += 1

    def run(self, budget: Budget) -> bool:
        """Look at all sets that may be as good as the best; return False when steps ran out."""
        part = budget.part(min(MOST_STEPS, budget.remaining))
        given = part.remaining
        try:
            # A small loss allowed at first soon finds a good set.
            allowed = max(1, self.changes[min(4, len(self.changes) - 1)][0])
            while allowed < self._spare():
                self._look(part, allowed)
                allowed *= 4
            self._look(part, None)
        except OutOfSteps:
            return False
        finally:
            budget.take_back(part, given)
        return True

    def _spare(self) -> int:
        """Return how much a set may lose and still be as good as the best."""
        return self.limit - self.scale * self.best

    def _look(self, budget: Budget, allowed: int | None) -> None:
        # Each entry: the next change to think of, the set, its loss, additions less drops.
        waiting = [(0, self.base, 0, 0)]
        while waiting:
            at, nodes, lost, balance = waiting.pop()
            if balance == 0:
                budget.spend(2 + self.question.size // 8)
                self.look_at(nodes)
            most = self._spare() if allowed is None else min(allowed, self._spare())
            following = []
            for i in range(at, len(self.changes)):
                loss, node, dropped = self.changes[i]
                if lost + loss > most:
                    break
                step = -1 if dropped else 1
                following.append((i + 1, nodes ^ 1 << node, lost + loss, balance + step))
            budget.spend(1 + len(following))
            # The smallest change is thought of first.
            waiting += reversed(following)

    @staticmethod
    def _sum(amount: Sequence[int], nodes: int) -> int:
        return sum(amount[v] for v in members(nodes))
