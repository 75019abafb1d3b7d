"""A sum of hops that no cycle through some nodes can be below.

Each node of a cycle has two hops, so half the sum of every node's two fastest is a bound. It rises
when each node is given a potential that is added to all its hops (Held and Karp's idea, with pairs
of hops in place of trees): every cycle through all the nodes grows by the same amount, twice the
sum of the potentials, while nodes that others lean on become dear.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.placement.domain.budget import Budget, OutOfSteps

_ROUNDS = 24

Rungs = Mapping[int, Sequence[tuple[int, int]]]


@dataclass(frozen=True)
class Potentials:
    """Potentials of some nodes, and what they prove."""

    of: Mapping[int, int]
    # By node: the sum of its two fastest hops, and the fastest, potentials of both ends added.
    two: Mapping[int, int]
    one: Mapping[int, int]

    @property
    def twice_bound(self) -> int:
        """Twice the bound on the sum of hops, without potentials."""
        return sum(self.two.values()) - 4 * sum(self.of.values())


def best_potentials(rungs: Rungs, budget: Budget) -> Potentials:
    """Return good potentials for cycles through all the nodes; each has two hops at least.

    By subgradient steps that become smaller; with the steps that there are. Raises Stopped.
    """
    of = dict.fromkeys(rungs, 0)
    best, leaned = _weighed(rungs, of)
    step = max(1, sum(best.two.values()) // (8 * len(rungs)))
    try:
        for _ in range(_ROUNDS):
            budget.spend(sum(map(len, rungs.values())) // 2)
            if all(count == 2 for count in leaned.values()):
                break
            of = {v: of[v] + step * (leaned[v] - 2) for v in of}
            found, leaned = _weighed(rungs, of)
            if found.twice_bound > best.twice_bound:
                best = found
            step = max(1, step * 7 // 8)
    except OutOfSteps:
        pass
    return best


def _weighed(rungs: Rungs, of: Mapping[int, int]) -> tuple[Potentials, dict[int, int]]:
    """Return what these potentials prove, and how often each node is among another's two."""
    two, one = {}, {}
    leaned = dict.fromkeys(of, 0)
    for node, own in rungs.items():
        (first, a), (second, b) = sorted((hop + of[other], other) for hop, other in own)[:2]
        two[node] = first + second + 2 * of[node]
        one[node] = first + of[node]
        leaned[a] += 1
        leaned[b] += 1
    return Potentials(of, two, one), leaned
