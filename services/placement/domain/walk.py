"""All cycles of a given length, the heaviest first: exact, and long where the graph is large."""

from collections.abc import Sequence

from services.placement.domain.budget import Budget, OutOfSteps
from services.placement.domain.net import members, reach
from services.placement.domain.rings import RingQuestion

# Larger rings would go too deep for a recursive walk, and it would not end in any case.
LARGEST_SIZE = 250
# So many times the nodes that are still to come are surely not cut off from the path's end.
_AMPLE = 3


class HeaviestWalk:
    """Finds one acceptable cycle of the largest weight; neighbours are tried heaviest first.

    Nodes are numbered by weight here, so that the lowest bits of a set are its heaviest nodes.
    """

    def __init__(self, question: RingQuestion, budget: Budget, best: int) -> None:
        """Cycles of `best` or less are of no use."""
        self.question, self.budget, self.best = question, budget, best
        own = sorted(members(question.nodes), key=lambda v: (-question.weight[v], v))
        place = {v: i for i, v in enumerate(own)}
        self.own = own
        self.weight = [question.weight[v] for v in own]
        self.near = [
            sum(1 << place[u] for u in members(question.net.near[v] & question.nodes)) for v in own
        ]
        self.required = sum(1 << place[v] for v in members(question.required))
        self.needs = [([amount[v] for v in own], needed) for amount, needed in question.needs]
        self.found: list[int] | None = None
        self.compared_count = self.rejected_count = 0

    def run(self) -> bool:
        """Walk from every start; return False when that was not done to the end."""
        if self.question.size > LARGEST_SIZE:
            return False
        everything = (1 << len(self.own)) - 1
        try:
            if self.required:
                self._from((self.required & -self.required).bit_length() - 1, everything)
                return True
            # Each cycle once: from its heaviest node.
            for start in range(len(self.own) - self.question.size + 1):
                allowed = everything >> start << start
                if self._most(allowed, 0, self.question.size) <= self.best:
                    break
                self._from(start, allowed)
        except OutOfSteps:
            return False
        return True

    def _from(self, start: int, allowed: int) -> None:
        self.start, self.allowed = start, allowed
        self.seen: set[tuple[int, int]] = set()
        # Layer d: the nodes within d steps of the start.
        self.within = [1 << start]
        while len(self.within) <= self.question.size:
            nearer = self.within[-1]
            wider = nearer
            for node in members(nearer):
                wider |= self.near[node]
            self.within.append(wider & allowed)
        self.budget.spend(len(self.own))
        self._extend([start], 1 << start)

    def _most(self, allowed: int, on_path: int, slots: int) -> int:
        """Return the weight of the heaviest allowed nodes that may still join; -1: too few."""
        free = allowed & ~on_path & ~self.required
        if free.bit_count() < slots:
            return -1
        return sum(self.weight[v] for v in _lowest(free, slots))

    def _enough(self, allowed: int, held: int, slots: int) -> bool:
        """Say whether the held nodes and the best of the others have what is needed."""
        for amount, needed in self.needs:
            have = sum(amount[v] for v in members(held))
            if have < needed and slots:
                free = sorted((amount[v] for v in members(allowed & ~held)), reverse=True)
                have += sum(free[:slots])
            if have < needed:
                return False
        return True

    def _extend(self, path: list[int], on_path: int) -> None:
        size, last = self.question.size, path[-1]
        left = size - len(path)
        if left == 0:
            self._close(path)
            return
        held = on_path | self.required
        slots = size - held.bit_count()
        state = (on_path, last)
        if slots < 0 or state in self.seen:
            return
        # What may still join: near enough to come home in time, and, where little is left, within
        # reach of the end.
        open_to = self.allowed & self.within[left] & ~on_path
        self.budget.spend(4 + (size + left) // 4)
        if open_to.bit_count() < _AMPLE * left:
            self.budget.spend(open_to.bit_count() // 4)
            open_to = reach(self.near, open_to | 1 << last, last)
        if self.required & ~on_path & ~open_to or not open_to & self.near[self.start]:
            return
        most = self._most(open_to, on_path, slots)
        if most < 0 or sum(self.weight[v] for v in members(held)) + most <= self.best:
            return
        if not self._enough(open_to | on_path, held, slots):
            return
        rejected_before = self.rejected_count
        joining = self.near[last] & open_to & ~on_path
        for node in members(joining):
            if slots or self.required >> node & 1:
                self._extend([*path, node], on_path | 1 << node)
        if self.rejected_count == rejected_before:
            # A cycle refused for its order says nothing about other orders of the same nodes.
            self.seen.add(state)

    def _close(self, path: list[int]) -> None:
        if not self.near[path[-1]] >> path[0] & 1:
            return
        cycle = [self.own[v] for v in path]
        weight = self.question.weigh(cycle)
        if weight <= self.best:
            return
        self.compared_count += 1
        self.budget.spend(8 * len(path))
        if self.question.accepts(cycle):
            self.found, self.best = cycle, weight
        else:
            self.rejected_count += 1


def _lowest(nodes: int, count: int) -> Sequence[int]:
    chosen = []
    while count:
        low = nodes & -nodes
        chosen.append(low.bit_length() - 1)
        nodes ^= low
        count -= 1
    return chosen
