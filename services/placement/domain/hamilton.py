"""A cycle of a given length in a set of nodes, or through all of them, by Posa's rotations."""

from collections.abc import Sequence

from services.placement.domain.budget import Budget
from services.placement.domain.chance import Chance
from services.placement.domain.net import members, set_of

# From so many ways on, the first will do as well as any.
_MANY_WAYS = 16


def cycle_through(
    near: Sequence[int],
    nodes: int,
    budget: Budget,
    chance: Chance,
    *,
    size: int,
    always: int,
    rotations: int,
) -> list[int] | None:
    """Return a cycle of `size` (at least 3) of the nodes, all of `always` among them.

    None: not found, which proves nothing. A path grows at its end, to the neighbour with the fewest
    ways on. Any stretch of it of the right length whose ends are neighbours is a cycle. Where it
    can't grow, its end part is turned round, which gives it another end; a path that closes to a
    cycle is opened beside a node that isn't on it yet. Raises OutOfSteps or Stopped.
    """
    path = [min(members(nodes), key=lambda v: ((near[v] & nodes).bit_count(), v))]
    free = nodes ^ 1 << path[0]
    while True:
        grown = _grow(near, path, free)
        budget.spend(4 * (len(grown) - len(path)) + 4)
        for node in grown[len(path) :]:
            free ^= 1 << node
        path = grown
        first, last = path[0], path[-1]
        if len(path) >= size:
            cycle = _stretch(near, path, size, always)
            if cycle is not None:
                return cycle
            budget.spend(len(path) // 4)
        if near[first] & free:
            path.reverse()
            continue
        if len(path) > 2 and near[last] >> first & 1:
            opened = _opened(near, path, free)
            if opened is not None:
                path = opened
                continue
        rotations -= 1
        turns = [path.index(v) + 1 for v in members(near[last] & nodes & ~free)]
        # Round its last hop is no turn at all.
        turns = [at for at in turns if at < len(path) - 1]
        if rotations < 0 or not turns:
            return None
        budget.spend(4 + len(path) // 8)
        good = [at for at in turns if near[path[at]] & free]
        closing = [at for at in turns if near[path[at]] >> first & 1]
        at = chance.choice(good or (closing if not free and closing else turns))
        path[at:] = path[at:][::-1]


def _grow(near: Sequence[int], path: Sequence[int], free: int) -> list[int]:
    grown, ways = list(path), near[path[-1]] & free
    while ways:
        if ways.bit_count() >= _MANY_WAYS:
            node = (ways & -ways).bit_length() - 1
        else:
            node = min(members(ways), key=lambda v: (near[v] & free).bit_count())
        grown.append(node)
        free ^= 1 << node
        ways = near[node] & free
    return grown


def _stretch(near: Sequence[int], path: list[int], size: int, always: int) -> list[int] | None:
    for i in range(len(path) - size + 1):
        if near[path[i]] >> path[i + size - 1] & 1:
            cycle = path[i : i + size]
            if not always or not always & ~set_of(cycle):
                return cycle
    return None


def _opened(near: Sequence[int], path: list[int], free: int) -> list[int] | None:
    """Return a closed path opened so that it ends beside a free node."""
    for at, node in enumerate(path):
        if near[node] & free:
            return path[at + 1 :] + path[: at + 1]
    return None
