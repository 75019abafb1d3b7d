"""How long to wait for others, so that the caller still hears whom we waited for."""

from services.common import deadline

# The rest of the caller's time is for the way back: past its deadline it would only see that
# placement was late, not which service was.
_SHARE = 0.9


def at_most(seconds: float) -> float:
    """Return `seconds`, or most of what is left of the caller's time if that is less."""
    return min(seconds, _SHARE * deadline.clip(2 * seconds))
