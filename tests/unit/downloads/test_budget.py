import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from services.downloads.worker import budget as module
from services.downloads.worker.budget import Budget


class Clock:
    """Time that passes only for those that sleep."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(module, "time", self)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_no_more_than_the_bound_beside_a_first_burst(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, budget = Clock(monkeypatch), Budget()
    budget.limit(1000)
    for _ in range(100):
        budget.take(50)
    assert clock.now == pytest.approx(100 + 5, abs=0.2)


def test_what_was_not_taken_for_long_is_not_owed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, budget = Clock(monkeypatch), Budget()
    budget.limit(1000)
    clock.now += 3600
    began = clock.now
    for _ in range(100):
        budget.take(50)
    assert clock.now - began == pytest.approx(5, abs=0.2)


def test_repeating_a_bound_gives_nothing_away(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, budget = Clock(monkeypatch), Budget()
    for _ in range(100):
        budget.limit(1000)
        budget.take(50)
    assert clock.now == pytest.approx(100 + 5, abs=0.2)


def test_without_a_bound_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, budget = Clock(monkeypatch), Budget()
    budget.take(10**12)
    budget.limit(1000)
    budget.limit(0)
    budget.take(10**12)
    assert clock.now == 100.0


def test_who_waits_hears_of_a_new_bound() -> None:
    budget = Budget()
    budget.limit(1)
    waiting = threading.Event()

    def take() -> None:
        waiting.set()
        budget.take(10**9)  # thirty years

    with ThreadPoolExecutor(1) as pool:
        taking = pool.submit(take)
        waiting.wait(10)
        while not taking.done():
            budget.limit(0)
        taking.result(10)
