"""How much work a search may do, counted in steps so that every copy answers the same."""

from collections.abc import Callable

# Steps between two questions whether anyone still waits; some milliseconds.
_ASK_EVERY = 2_000


class OutOfSteps(Exception):
    """The steps of this part of the search are used up; what was found so far stands."""


class Stopped(Exception):
    """Nobody waits for the answer any more, or its time is up."""


class Budget:
    """Steps to spend. Steps, not seconds: the same question gets the same answer anywhere."""

    def __init__(self, steps: int, stopped: Callable[[], bool] = lambda: False) -> None:
        """`stopped` is asked now and then; once it says True, `spend` raises Stopped."""
        self.remaining = steps
        self._stopped = stopped
        self._until_asked = 0

    def spend(self, steps: int) -> None:
        """Note work done. Raises OutOfSteps or Stopped."""
        self._until_asked -= steps
        if self._until_asked <= 0:
            self._until_asked = _ASK_EVERY
            if self._stopped():
                raise Stopped
        self.remaining -= steps
        if self.remaining < 0:
            raise OutOfSteps

    def part(self, steps: int) -> "Budget":
        """Return a budget of its own for a part of the search, with the same `stopped`."""
        return Budget(steps, self._stopped)

    def take_back(self, part: "Budget", steps: int) -> None:
        """Note what a part made with so many steps has used; more than that is not counted."""
        self.remaining = max(0, self.remaining - (steps - max(0, part.remaining)))
