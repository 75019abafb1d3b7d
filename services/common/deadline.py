"""How much of the caller's time is left, for the calls made on its behalf."""

import time
from contextvars import ContextVar

_SHARE = 0.9

_deadline: ContextVar[float | None] = ContextVar("deadline", default=None)


def set_remaining(seconds: float | None) -> None:
    """Note how long the call now being handled may still take; None: as long as it likes."""
    _deadline.set(None if seconds is None else time.monotonic() + seconds)


def clip(seconds: float) -> float:
    """Return `seconds`, or what is left of the caller's time if that is less."""
    deadline = _deadline.get()
    return seconds if deadline is None else max(0.0, min(seconds, deadline - time.monotonic()))


def leaving_time(seconds: float) -> float:
    """Return `seconds`, or most of what is left of the caller's time if that is less.

    The rest is for the way back: past its deadline the caller would only see that this service
    was late, not whom it waited for.
    """
    return min(seconds, _SHARE * clip(2 * seconds))
