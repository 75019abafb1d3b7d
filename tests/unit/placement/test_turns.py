"""Searches by turns, with threads that really wait for each other."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from services.placement.turns import Turn, Turns

LONG = 30.0
COUNT = 8


def in_turns(turns: Turns, work: Callable[[Turn], None], seconds: float = LONG) -> None:
    with turns.turn(time.monotonic() + seconds) as turn:
        work(turn)


def test_one_computes_at_a_time_and_all_come_to_an_end() -> None:
    turns, computing, most = Turns(0.0005), 0, 0
    together = threading.Barrier(COUNT)

    def work(turn: Turn) -> None:
        nonlocal computing, most
        for _ in range(20):
            computing += 1
            most = max(most, computing)
            time.sleep(0.0002)
            computing -= 1
            turn.give_way()

    def search() -> None:
        together.wait(LONG)
        in_turns(turns, work)

    with ThreadPoolExecutor(COUNT) as pool:
        for done in [pool.submit(search) for _ in range(COUNT)]:
            done.result(LONG)
    assert most == 1


def test_a_short_search_does_not_wait_for_long_ones() -> None:
    turns, short_done, give_up = Turns(0.001), threading.Event(), time.monotonic() + LONG
    begun = threading.Semaphore(0)

    def long(turn: Turn) -> None:
        begun.release()
        # It ends only when the short one, which came last, has.
        while not short_done.is_set() and time.monotonic() < give_up:
            turn.give_way()

    with ThreadPoolExecutor(COUNT) as pool:
        searches = [pool.submit(in_turns, turns, long) for _ in range(COUNT - 1)]
        for _ in searches:
            assert begun.acquire(timeout=LONG)
        pool.submit(in_turns, turns, lambda turn: None).result(LONG)
        short_done.set()
        for search in searches:
            search.result(LONG)


def test_who_waits_too_long_gives_up_and_holds_nobody_up() -> None:
    turns, gave_up = Turns(0.0), threading.Event()

    def late() -> None:
        try:
            with pytest.raises(TimeoutError):
                in_turns(turns, lambda turn: None, seconds=0.01)
        finally:
            gave_up.set()

    with ThreadPoolExecutor(2) as pool, turns.turn(time.monotonic() + LONG) as turn:
        search = pool.submit(late)
        assert gave_up.wait(LONG)
        search.result(LONG)
        turn.give_way()
    in_turns(turns, lambda turn: None)


def test_a_turn_lost_for_want_of_time_is_free_for_others() -> None:
    turns, holding, release = Turns(0.0), threading.Event(), threading.Event()

    def hold(turn: Turn) -> None:
        holding.set()
        assert release.wait(LONG)

    def lose() -> None:
        with turns.turn(time.monotonic() + 0.2) as turn:
            other = pool.submit(in_turns, turns, hold)
            with pytest.raises(TimeoutError):
                while True:
                    turn.give_way()
        release.set()
        other.result(LONG)

    with ThreadPoolExecutor(2) as pool:
        pool.submit(lose).result(LONG)
    assert holding.is_set()
    in_turns(turns, lambda turn: None)
