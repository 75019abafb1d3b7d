"""Which sequences' key-value caches are kept, so that prompts that begin alike re-use them."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

MAX_KEPT = 16
# Shorter ones are computed faster than they are looked up and copied.
MIN_TOKENS = 16


@dataclass(frozen=True)
class Prefix:
    """Caches of `tokens`, held by every rank under `entry`."""

    entry: int
    tokens: tuple[int, ...]
    # So many of the tokens went through whole chunks of a prompt, alone.
    exact_count: int


@dataclass(frozen=True)
class Found:
    """Re-use `length` tokens of a kept sequence."""

    entry: int
    length: int
    exact_count: int


class Prefixes:
    """The kept sequences, least recently used first.

    `trimmable_below`: caches of fewer tokens than this can be cut back; None: all can.
    """

    def __init__(self, trimmable_below: int | None) -> None:
        self._below = trimmable_below
        self._kept: OrderedDict[int, Prefix] = OrderedDict()
        self._next_entry = 0

    def __iter__(self) -> Iterator[Prefix]:
        return iter(self._kept.values())

    def find(self, tokens: Sequence[int], grid: int = 0) -> Found | None:
        """Return the longest kept beginning of a prompt, its last token left to be computed.

        With `grid`, only what a prompt's own chunks of that size would have computed is taken.
        """
        best: Found | None = None
        for prefix in self._kept.values():
            length = min(common_length(prefix.tokens, tokens), len(tokens) - 1)
            if grid:
                length = min(length, prefix.exact_count) // grid * grid
            if length < len(prefix.tokens) and not self.is_trimmable(len(prefix.tokens)):
                continue
            if length >= MIN_TOKENS and (best is None or length > best.length):
                best = Found(prefix.entry, length, min(prefix.exact_count, length))
        if best is not None:
            self._kept.move_to_end(best.entry)
        return best

    def keep(self, tokens: Sequence[int], exact_count: int) -> tuple[int | None, list[int]]:
        """Note that a sequence's caches are kept; return its entry, and entries to be dropped.

        No entry where it is not worth keeping.
        """
        if len(tokens) < MIN_TOKENS:
            return None, []
        whole = tuple(tokens)
        dropped = []
        for prefix in list(self._kept.values()):
            shared = common_length(prefix.tokens, whole)
            length = len(prefix.tokens)
            serves = length == len(whole) or self.is_trimmable(max(length, len(whole)))
            if shared == len(whole) and serves and exact_count <= prefix.exact_count:
                self._kept.move_to_end(prefix.entry)
                return None, []
            if shared == length and serves and prefix.exact_count <= exact_count:
                dropped.append(prefix.entry)
        self._next_entry += 1
        for entry in dropped:
            del self._kept[entry]
        self._kept[self._next_entry] = Prefix(self._next_entry, whole, exact_count)
        if len(self._kept) > MAX_KEPT:
            dropped.append(self._kept.popitem(last=False)[0])
        return self._next_entry, dropped

    def drop_oldest(self) -> int | None:
        """Forget the least recently used one, and return its entry; None: none is kept."""
        return self._kept.popitem(last=False)[0] if self._kept else None

    def is_trimmable(self, length: int) -> bool:
        """Say whether caches of so many tokens can be cut back to fewer."""
        return self._below is None or length < self._below


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens two sequences begin with alike."""
    low, high = 0, min(len(one), len(other))
    if tuple(one[:MIN_TOKENS]) != tuple(other[:MIN_TOKENS]):
        high = min(high, MIN_TOKENS)  # as most do
    # By halves: comparing slices is far faster than comparing tokens one by one.
    while low < high:
        middle = (low + high + 1) // 2
        if tuple(one[low:middle]) == tuple(other[low:middle]):
            low = middle
        else:
            high = middle - 1
    return low
