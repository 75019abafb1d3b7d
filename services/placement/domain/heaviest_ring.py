"""The heaviest acceptable cycle of a given length."""

from collections.abc import Sequence
from math import inf

from services.placement.domain.budget import Budget, OutOfSteps
from services.placement.domain.rings import Ring, RingQuestion, canonical
from services.placement.domain.walk import Walk


class HeaviestWalk(Walk):
    """Finds one acceptable cycle of the largest weight; neighbours are tried heaviest first."""

    def __init__(self, question: RingQuestion, budget: Budget) -> None:
        super().__init__(question, budget)
        self.ring: Ring | None = None
        self.best = -1
        self.rejected_count = 0

    def run(self) -> bool:
        """Walk from every start; return False when the budget ran out."""
        question = self.question
        try:
            if question.required:
                self._from(min(question.required), self.by_weight)
            else:
                # Each cycle once: from its heaviest node.
                for i, start in enumerate(self.by_weight):
                    allowed = self.by_weight[i:]
                    top = self.heaviest_left(allowed, set(), question.size)
                    if top is None or top.weight <= self.best:
                        break
                    if not self.enough(allowed, set(), question.size):
                        break
                    self._from(start, allowed)
        except OutOfSteps:
            return False
        return True

    def _from(self, start: str, allowed: Sequence[str]) -> None:
        self.allowed = allowed
        self.distance = self.distances(start, set(allowed))
        # States (nodes on the path, its end) from which everything has been tried.
        self.seen: set[tuple[frozenset[str], str]] = set()
        self._extend([start], {start}, self.start_weight(start))

    def _extend(self, path: list[str], on_path: set[str], weight: int) -> None:
        question, last = self.question, path[-1]
        left = question.size - len(path)
        if left == 0:
            self._close(path, weight)
            return
        slots = left - len(question.required - on_path)
        state = (frozenset(on_path), last)
        if slots < 0 or state in self.seen:
            return
        top = self.heaviest_left(self.allowed, on_path, slots)
        if top is None or weight + top.weight <= self.best:
            return
        if not self.enough(self.allowed, on_path, slots):
            return
        rejected_before = self.rejected_count
        self.budget.spend(len(self.neighbours[last]))
        for node in self.ranked_neighbours[last]:
            if node in on_path or self.distance.get(node, inf) > left:
                continue
            reach = self.weight_with(node, weight, slots, top)
            if reach is None or reach[1] <= self.best:
                continue
            self._extend([*path, node], on_path | {node}, reach[0])
        if self.rejected_count == rejected_before:
            # A cycle refused for its order says nothing about other orders of the same nodes.
            self.seen.add(state)

    def _close(self, path: list[str], weight: int) -> None:
        if path[0] not in self.neighbours[path[-1]]:
            return
        self.compared_count += 1
        self.budget.spend(len(path) ** 2)
        ring = canonical(path)
        if self.question.accept(ring):
            self.ring, self.best = ring, weight
        else:
            self.rejected_count += 1
