"""What the walks over paths of a graph share: what may still join a path, how far home is."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from services.placement.domain.budget import Budget
from services.placement.domain.rings import RingQuestion


@dataclass(frozen=True)
class Left:
    """The heaviest nodes that may still join a path."""

    nodes: frozenset[str]
    # Of all of them.
    weight: int
    # Of all but the lightest: what fits beside one other node.
    weight_beside: int


class Walk:
    """What both walks over paths share."""

    def __init__(self, question: RingQuestion, budget: Budget) -> None:
        self.question, self.budget = question, budget
        self.neighbours = {node: set(question.graph[node]) for node in question.graph}
        # Heaviest first; ties by id, so that the walk is the same everywhere.
        self.by_weight = sorted(question.graph, key=lambda node: (-question.weight[node], node))
        position = {node: i for i, node in enumerate(self.by_weight)}
        self.ranked_neighbours = {
            node: sorted(near, key=position.__getitem__) for node, near in self.neighbours.items()
        }
        self.compared_count = 0

    def start_weight(self, start: str) -> int:
        """Return the weight of a path of one node: all required nodes count from the start."""
        return sum(self.question.weight[node] for node in self.question.required | {start})

    def weight_with(
        self, node: str, weight: int, slots: int, top: "Left"
    ) -> tuple[int, int] | None:
        """Return a path's weight with `node` joined to it, and the most it can then grow to.

        None when the path has room for required nodes only and `node` is not one.
        """
        if node in self.question.required:
            return weight, weight + top.weight
        if slots == 0:
            return None
        own = self.question.weight[node]
        if node in top.nodes:
            return weight + own, weight + top.weight
        return weight + own, weight + own + top.weight_beside

    def heaviest_left(self, allowed: Sequence[str], path: set[str], slots: int) -> "Left | None":
        """Return the `slots` heaviest of the allowed (heaviest first) that are neither required
        nor on the path; None when there are fewer."""
        required, weight = self.question.required, self.question.weight
        free = (node for node in allowed if node not in path and node not in required)
        top = list(islice(free, slots))
        self.budget.spend(len(path) + slots)
        if len(top) < slots:
            return None
        return Left(
            frozenset(top),
            sum(weight[node] for node in top),
            sum(weight[node] for node in top[:-1]),
        )

    def distances(self, start: str, allowed: set[str]) -> dict[str, int]:
        """Return the number of edges from each allowed node to `start`."""
        found, frontier, distance = {start: 0}, [start], 0
        while frontier:
            distance += 1
            nearby = {
                n for node in frontier for n in self.neighbours[node] & allowed if n not in found
            }
            found.update(dict.fromkeys(nearby, distance))
            frontier = list(nearby)
        self.budget.spend(len(found))
        return found

    def enough(self, allowed: Sequence[str], path: set[str], slots: int) -> bool:
        """Say whether path, required and the best `slots` free nodes have what is needed."""
        question = self.question
        held = path | question.required
        for amount, needed in question.needs:
            have = sum(amount[node] for node in held)
            if have < needed and slots > 0:
                free = sorted((amount[node] for node in allowed if node not in held), reverse=True)
                have += sum(free[:slots])
            if have < needed:
                return False
        self.budget.spend(len(allowed))
        return True
