"""For how long whoever asks the hub something is ready to wait for it."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

# For the answer to a call that somebody waits for, and for a download's first look at the hub: its
# limits on requests are by windows of five minutes.
ANSWER_SECONDS = 50.0
DOWNLOAD_SECONDS = 900.0
# The part of it that may be spent on a hub that fails: one that states a wait says more.
_FAULTS_SHARE = 0.2


class Patience:
    """A time that ends at a moment, or when whoever waits has gone."""

    def __init__(self, seconds: float) -> None:
        self.faults_seconds = _FAULTS_SHARE * seconds
        self._until = time.monotonic() + seconds
        self._over = threading.Event()

    @property
    def is_over(self) -> bool:
        """True when nobody waits any more."""
        return self._over.is_set()

    @property
    def left_seconds(self) -> float:
        """What is left of it, 0 at the least."""
        return 0.0 if self._over.is_set() else max(0.0, self._until - time.monotonic())

    def wait(self, seconds: float) -> bool:
        """Wait; false, without waiting or early, when the patience is not enough or over."""
        return seconds < self.left_seconds and not self._over.wait(seconds)

    def end(self) -> None:
        """Wake whoever waits: nobody wants the answer any more."""
        self._over.set()


_current: ContextVar[Patience | None] = ContextVar("patience", default=None)


def patience() -> Patience:
    """Return the patience of the call that runs; by default none to try anything twice."""
    return _current.get() or Patience(0.0)


@contextmanager
def with_patience(given: Patience | None) -> Iterator[None]:
    """Have everything inside ask with this patience. None: as little as possible."""
    token = _current.set(given)
    try:
        yield
    finally:
        _current.reset(token)
