"""Numbers that look random and are the same in every process and version."""

from collections.abc import Sequence
from typing import TypeVar

Item = TypeVar("Item")

_MASK = (1 << 64) - 1


class Chance:
    """Knuth's linear congruential generator, from a fixed start."""

    def __init__(self, seed: int = 1) -> None:
        self._state = seed

    def below(self, limit: int) -> int:
        """Return a number from 0 on and below a limit that is at least 1."""
        self._state = (self._state * 6364136223846793005 + 1442695040888963407) & _MASK
        return (self._state >> 33) % limit

    def choice(self, items: Sequence[Item]) -> Item:
        """Return one of the items, of which there is at least one."""
        return items[self.below(len(items))]
