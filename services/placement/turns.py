"""Searches by turns: one computes at a time, for a moment; who has computed least goes next.

Python runs one thread at a time in any case. Left to itself it lets all searches run into each
other, and the event loop between them: with fifty, every step of every call waits for fifty
threads. By turns the loop shares with one thread, and a search that takes so long in all waits for
no more than as long of each of the others, however long these take: its share and no more.
"""

import heapq
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

# How long a search computes while others wait.
TURN_SECONDS = 0.005


@dataclass(order=True)
class _Place:
    """A search's place in the queue."""

    # Seconds.
    computed: float
    arrival: int
    came: threading.Event = field(default_factory=threading.Event, compare=False)


class Turns:
    """Who computes, and who waits for a turn. Used from many threads."""

    def __init__(self, seconds: float = TURN_SECONDS) -> None:
        self.seconds = seconds
        self._lock = threading.Lock()
        self._waiting: list[_Place] = []
        self._arrivals = 0
        self._taken = False

    @contextmanager
    def turn(self, until: float) -> Iterator["Turn"]:
        """Wait for the first turn, and leave what follows to the caller.

        Raises TimeoutError once time.monotonic() is past `until` and it has not come.
        """
        with self._lock:
            place = self._queued(0.0) if self._taken else None
            self._taken = True
        if place is not None:
            self._wait(place, until)
        turn = Turn(self, until)
        try:
            yield turn
        finally:
            if turn.held:
                with self._lock:
                    self._hand_on()

    def give_way(self, computed: float, until: float) -> None:
        """After so many seconds let the next one compute, if one waits, and wait for another turn.

        Raises TimeoutError; the turn is then lost.
        """
        with self._lock:
            if not self._waiting:
                return
            place = self._queued(computed)
            self._hand_on()
        self._wait(place, until)

    def _queued(self, computed: float) -> _Place:
        self._arrivals += 1
        place = _Place(computed, self._arrivals)
        heapq.heappush(self._waiting, place)
        return place

    def _hand_on(self) -> None:
        if self._waiting:
            heapq.heappop(self._waiting).came.set()
        else:
            self._taken = False

    def _wait(self, place: _Place, until: float) -> None:
        if place.came.wait(max(0.0, until - time.monotonic())):
            return
        with self._lock:
            if place in self._waiting:
                self._waiting.remove(place)
                heapq.heapify(self._waiting)
            else:
                # It came at the last moment.
                self._hand_on()
        raise TimeoutError


class Turn:
    """One search's place among the others."""

    def __init__(self, turns: Turns, until: float) -> None:
        self._turns, self._until = turns, until
        self._began, self._computed = time.monotonic(), 0.0
        # False once it was lost for want of time.
        self.held = True

    def give_way(self) -> None:
        """Call this now and then; it waits while others compute.

        Raises TimeoutError once the time is up.
        """
        spent = time.monotonic() - self._began
        if spent < self._turns.seconds:
            return
        self._computed += spent
        try:
            self._turns.give_way(self._computed, self._until)
        except TimeoutError:
            self.held = False
            raise
        self._began = time.monotonic()
