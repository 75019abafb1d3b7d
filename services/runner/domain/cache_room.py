"""How much memory the key-value caches of sequences take on each rank, and what they may take."""

from collections.abc import Iterable
from dataclasses import dataclass

# Caches grow by this many tokens at a time (mlx_lm.models.cache.KVCache.step).
STEP_TOKENS = 256


@dataclass(frozen=True)
class CacheCost:
    """What one sequence takes on one rank, and what all may take there.

    `fixed_bytes` whatever its length (states of state-space layers). `kinds` holds pairs (bytes per
    token, window): of layers that keep `window` tokens at most, 0: all. Caches of fewer tokens than
    `trimmable_below` can be cut back; None: of any number.
    """

    fixed_bytes: int
    kinds: tuple[tuple[int, int], ...]
    limit_bytes: int
    trimmable_below: int | None = None

    def bytes_for(self, token_count: int) -> int:
        """Return the bytes of one sequence of so many tokens; with windows, at most so many."""
        total = self.fixed_bytes
        for per_token, window in self.kinds:
            # A window's cache grows by a step from wherever it stands, and past its window by a
            # chunk of a prompt.
            kept = min(token_count, window) + STEP_TOKENS if window else token_count
            total += per_token * (kept if window else round_up(kept))
        return total

    def kinds_at_most(self, count: int) -> tuple[tuple[int, int], ...]:
        """Return no more than `count` kinds that take as much or more."""
        first, rest = self.kinds[: count - 1], self.kinds[count - 1 :]
        if len(rest) < 2:
            return self.kinds
        # As if none of the rest forgot anything.
        return (*first, (sum(per_token for per_token, _ in rest), 0))


@dataclass(frozen=True)
class Shortage:
    """A sequence that a rank can never hold."""

    rank: int
    token_count: int
    needed_bytes: int
    limit_bytes: int


class CacheRoom:
    """The ranks' limits."""

    def __init__(self, costs: Iterable[CacheCost]) -> None:
        self._costs = tuple(costs)

    def fits(self, token_counts: Iterable[int]) -> bool:
        """Say whether caches of these lengths fit on every rank at once."""
        counts = list(token_counts)
        return all(sum(map(cost.bytes_for, counts)) <= cost.limit_bytes for cost in self._costs)

    def shortage(self, token_count: int) -> Shortage | None:
        """Return where a single sequence of this length cannot be held; None: nowhere."""
        for rank, cost in enumerate(self._costs):
            needed = cost.bytes_for(token_count)
            if needed > cost.limit_bytes:
                return Shortage(rank, token_count, needed, cost.limit_bytes)
        return None

    def longest(self, at_most: int) -> int:
        """Return the length of the longest single sequence that every rank can hold."""
        low, high = 0, at_most
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.shortage(middle) is None else (low, middle - 1)
        return low

    @property
    def trimmable_below(self) -> int | None:
        """Return below which length caches can be cut back to fewer tokens; None: at any length."""
        below = (cost.trimmable_below for cost in self._costs)
        return min((limit for limit in below if limit is not None), default=None)


def round_up(token_count: int) -> int:
    """Return for how many tokens a cache of so many has room."""
    return -(-token_count // STEP_TOKENS) * STEP_TOKENS
