"""The ring that came second, and why it lost."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from services.placement.domain.budget import Budget
from services.placement.domain.candidates import Candidates
from services.placement.domain.model import Model
from services.placement.domain.rings import Ring, hop_score
from services.placement.domain.search import RingSearch

# How many of the ring's nodes are left out, one at a time, to find what would be placed then.
MOST_LEFT_OUT = 4
STEPS = 20_000


class LostBy(StrEnum):
    """The first rule by which one ring goes before another of the same size."""

    LEAF = "LEAF"
    DOWNLOAD_SCORE = "DOWNLOAD_SCORE"
    MEMORY = "MEMORY"
    HOPS = "HOPS"
    NODE_IDS = "NODE_IDS"


@dataclass(frozen=True)
class RunnerUp:
    """A ring that would do as well, and the rule by which another one goes before it."""

    ring: Ring
    lost_by: LostBy


def runner_up(candidates: Candidates, model: Model, ring: Ring, budget: Budget) -> RunnerUp | None:
    """Return the best ring of the same size found without one of the nodes that count least.

    Any other set of as many nodes lacks one of the ring's; which one is tried for a few. None:
    none was found.
    """
    order = _Order(candidates)
    free = [node for node in ring if node not in candidates.required]
    search, found = RingSearch(candidates, model), []
    for node in sorted(free, key=lambda n: (order.weight(n), n))[:MOST_LEFT_OUT]:
        other = search.of_size(len(ring), budget.part(STEPS), without=frozenset((node,))).ring
        if other is not None:
            found.append(other)
    if not found:
        return None
    best = min(found, key=order.key)
    return RunnerUp(best, order.first_difference(ring, best))


class _Order:
    """Compares rings of one size as the search does."""

    def __init__(self, candidates: Candidates) -> None:
        self._candidates = candidates

    def weight(self, node: str) -> tuple[int, int]:
        scores: Mapping[str, int] = self._candidates.download_scores
        return scores[node], self._candidates.memory_bytes[node]

    def parts(self, ring: Ring) -> dict[LostBy, object]:
        weights = [self.weight(node) for node in ring]
        return {
            LostBy.LEAF: self._candidates.cluster.leaves.isdisjoint(ring),
            LostBy.DOWNLOAD_SCORE: -sum(score for score, _ in weights),
            LostBy.MEMORY: -sum(memory for _, memory in weights),
            LostBy.HOPS: hop_score(self._candidates.graph, ring),
            LostBy.NODE_IDS: ring,
        }

    def key(self, ring: Ring) -> tuple[object, ...]:
        return tuple(self.parts(ring).values())

    def first_difference(self, ring: Ring, other: Ring) -> LostBy:
        mine, others = self.parts(ring), self.parts(other)
        return next((part for part in LostBy if mine[part] != others[part]), LostBy.NODE_IDS)
