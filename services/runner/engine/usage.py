"""How much of the time a rank computes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Busy:
    """Adds up the time spent computing."""

    def __init__(self) -> None:
        self._since = time.perf_counter()
        self._seconds = 0.0

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Count the time that the block takes."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._seconds += time.perf_counter() - began

    @property
    def seconds(self) -> float:
        """Seconds since the last reading."""
        return time.perf_counter() - self._since

    def read(self) -> float:
        """Return the share of the time since the last reading that was spent computing, 0 to 1."""
        now = time.perf_counter()
        share = self._seconds / max(now - self._since, 1e-9)
        self._since, self._seconds = now, 0.0
        return min(1.0, share)
