"""What all downloads of a node share: how many files at a time, and how many bytes a second."""

from collections.abc import Callable


class Slots:
    """Leave to fetch a file. Who finds none is told when one is free, first come, first served."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: list[Callable[[], None]] = []

    def take(self, who: Callable[[], None], most: int) -> int:
        """Return how many of `most` slots the caller got; `who` is called once there may be more.

        With 0 it waits no longer. While others wait, it gets one at a time.
        """
        first = not self._waiting or self._waiting[0] == who
        if most and not first:
            if who not in self._waiting:
                self._waiting.append(who)
            self._wake()
            return 0
        if who in self._waiting:
            self._waiting.remove(who)
        got = min(self._free, most, 1 if self._waiting else most)
        self._free -= got
        if got < most:
            self._waiting.append(who)
        self._wake()
        return got

    def give_back(self, count: int = 1) -> None:
        """Return slots that were taken."""
        self._free += count
        self._wake()

    def _wake(self) -> None:
        if self._free and self._waiting:
            self._waiting[0]()


class SharedRate:
    """A bound on bytes per second, divided evenly among those that receive. 0: no bound."""

    def __init__(self, bytes_per_second: float) -> None:
        self.bytes_per_second = bytes_per_second
        self._receivers: list[Callable[[float], None]] = []

    def join(self, receiver: Callable[[float], None]) -> None:
        """Count in who receives from now on; it is called with its share whenever that changes."""
        self._receivers.append(receiver)
        self._divide()

    def leave(self, receiver: Callable[[float], None]) -> None:
        """Count out who receives no longer."""
        if receiver in self._receivers:
            self._receivers.remove(receiver)
            self._divide()

    def _divide(self) -> None:
        if self.bytes_per_second:
            for receiver in self._receivers:
                receiver(self.bytes_per_second / len(self._receivers))
