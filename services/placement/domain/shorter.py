"""A smaller sum of hops for a cycle, by Lin and Kernighan's chains of exchanges."""

from collections.abc import Mapping, Sequence

from services.placement.domain.budget import Budget, OutOfSteps
from services.placement.domain.net import members, set_of

# Longest chain of exchanges, and how many first exchanges are tried from each end.
_DEPTH = 8
_BREADTH = 3

Rungs = Mapping[int, Sequence[tuple[int, int]]]


def shorter(
    cycle: Sequence[int],
    hops: Sequence[Mapping[int, int]],
    rungs: Rungs,
    limit: int,
    budget: Budget,
) -> list[int]:
    """Return a cycle through the same nodes with no larger sum of hops, none above the limit.

    `rungs`: by node its hops to the others, the fastest first. Stops when the steps run out.
    Raises Stopped.
    """
    best = list(cycle)
    doubtful = list(best)
    try:
        while doubtful:
            node = doubtful.pop()
            for mirrored in (False, True):
                at = best.index(node)
                path = best[at:] + best[:at]
                if mirrored:
                    path = [path[0], *reversed(path[1:])]
                better = _chain(path, hops, rungs, limit, budget)
                if better is not None:
                    before = set(zip(best, best[1:] + best[:1], strict=True))
                    before |= {(b, a) for a, b in before}
                    best = better
                    after = zip(best, best[1:] + best[:1], strict=True)
                    moved = {v for pair in after if pair not in before for v in pair}
                    doubtful += [v for v in sorted(moved) if v not in doubtful]
                    doubtful.append(node)
                    break
    except OutOfSteps:
        pass
    return best


def _chain(
    path: list[int],
    hops: Sequence[Mapping[int, int]],
    rungs: Rungs,
    limit: int,
    budget: Budget,
) -> list[int] | None:
    """Return a shorter cycle than the closed path, beginning with another hop from its last node
    than the one to its first."""
    start = path[0]
    freed = hops[path[-1]][start]
    for first in range(_BREADTH):
        walked, gain, added = path, freed, {start}
        for depth in range(_DEPTH):
            budget.spend(6 + len(path) // 16)
            last = walked[-1]
            # (Gain after it, where to turn round).
            best: tuple[int, int] | None = None
            skipped = first if depth == 0 else 0
            for hop, other in rungs[last]:
                if hop >= gain or hop > limit:
                    break
                at = walked.index(other)
                if at >= len(walked) - 2 or other in added:
                    continue
                if skipped:
                    skipped -= 1
                    continue
                after = gain - hop + hops[other][walked[at + 1]]
                if best is None or after > best[0]:
                    best = (after, at)
                if depth == 0:
                    break
            if best is None:
                break
            gain, at = best
            added.add(last)
            walked = walked[: at + 1] + walked[at + 1 :][::-1]
            closing = hops[walked[-1]].get(start)
            if closing is not None and closing <= limit and closing < gain:
                return walked
    return None


def exchanged(
    cycle: Sequence[int],
    hops: Sequence[Mapping[int, int]],
    near: Sequence[int],
    spare: int,
    budget: Budget,
) -> list[int]:
    """Put spare nodes in the place of some of them where that makes the sum of hops smaller.

    `near`: by node the neighbours that may stand beside it. Stops when the steps run out.
    """
    best = list(cycle)
    unused = spare & ~set_of(best)
    try:
        for at, node in enumerate(best):
            if not spare >> node & 1:
                continue
            left, right = best[at - 1], best[(at + 1) % len(best)]
            fits = list(members(near[left] & near[right] & unused))
            budget.spend(1 + len(fits))
            other = min(fits, key=lambda v: hops[left][v] + hops[right][v], default=node)
            if hops[left][other] + hops[right][other] < hops[left][node] + hops[right][node]:
                best[at] = other
                unused ^= 1 << other | 1 << node
    except OutOfSteps:
        pass
    return best
