"""The plan of one shard, alone and in every order in which ranks can move."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.runner.domain.plan import Action, View, missing_ranks, next_action, stall_limit
from services.runner.domain.state import ShardState as S


def view(rank: int, state: S, *siblings: S, complete: bool = True, busy: bool = False) -> View:
    others = [r for r in range(len(siblings) + 1) if r != rank]
    states = dict(zip(others, siblings, strict=True))
    return View(rank, len(siblings) + 1, state, states, complete, busy)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (view(0, S.PENDING, S.PENDING), Action.DOWNLOAD),
        # Accepting ranks do not wait for the others' files.
        (view(0, S.DOWNLOADING, S.PENDING, S.PENDING), Action.CONNECT),
        (view(0, S.DOWNLOADING, S.PENDING, complete=False), Action.WAIT),
        # The connecting rank waits until all others are connecting.
        (view(2, S.DOWNLOADING, S.CONNECTING, S.DOWNLOADING), Action.WAIT),
        (view(2, S.DOWNLOADING, S.CONNECTING, S.CONNECTING), Action.CONNECT),
        (view(0, S.CONNECTED, S.CONNECTED, S.CONNECTING), Action.LOAD),
        (view(0, S.CONNECTED, S.CONNECTED, S.DOWNLOADING), Action.WAIT),
        (view(0, S.LOADED, S.LOADED, S.LOADING), Action.WAIT),
        (view(0, S.LOADED, S.WARMING_UP, S.LOADED), Action.WARM_UP),
        (view(2, S.LOADED, S.WARMING_UP, S.LOADED), Action.WAIT),
        (view(2, S.LOADED, S.WARMING_UP, S.WARMING_UP), Action.WARM_UP),
        (view(0, S.READY, S.READY, S.READY), Action.WAIT),
        (view(0, S.READY, S.READY, S.FAILED), Action.FAIL),
        (view(0, S.LOADING, S.STOPPING, busy=True), Action.STOP),
        # What failed tells more than what stopped because of it.
        (view(0, S.READY, S.STOPPED, S.FAILED), Action.FAIL),
        (view(0, S.FAILED, S.READY), Action.WAIT),
        (view(0, S.STOPPED, S.FAILED), Action.WAIT),
        # A ring of one passes through everything by itself.
        (view(0, S.DOWNLOADING), Action.CONNECT),
        (view(0, S.CONNECTED), Action.LOAD),
        (view(0, S.LOADED), Action.WARM_UP),
    ],
)
def test_next_action(given: View, expected: Action) -> None:
    assert next_action(given) is expected


_BEGINS = {
    Action.DOWNLOAD: S.DOWNLOADING,
    Action.CONNECT: S.CONNECTING,
    Action.LOAD: S.LOADING,
    Action.WARM_UP: S.WARMING_UP,
}
_ENDS = {S.CONNECTING: S.CONNECTED, S.LOADING: S.LOADED, S.WARMING_UP: S.READY}


@given(size=st.integers(1, 6), seed=st.integers())
def test_every_order_ends_ready(size: int, seed: int) -> None:
    """Ranks move in random order, each seeing the others as they truly are."""
    order = random.Random(seed)
    states = [S.PENDING] * size
    complete, busy = [False] * size, [False] * size
    for _ in range(400 * size):
        if all(state is S.READY for state in states):
            return
        rank = order.randrange(size)
        if busy[rank]:
            # What it began ends: but the ring forms, and warms up, only with all ranks in it.
            if states[rank] is S.DOWNLOADING:
                complete[rank], busy[rank] = True, False
            elif states[rank] is S.LOADING or min(states) >= states[rank]:
                states[rank], busy[rank] = _ENDS[states[rank]], False
            continue
        others = {other: state for other, state in enumerate(states) if other != rank}
        action = next_action(View(rank, size, states[rank], others, complete[rank], busy[rank]))
        if action is Action.WAIT:
            continue
        if action is Action.CONNECT and rank == size - 1:
            assert all(state >= S.CONNECTING for state in others.values())
        if action is Action.LOAD:
            assert all(complete)
        states[rank], busy[rank] = _BEGINS[action], True
    pytest.fail(f"stuck in {states}")


def test_a_stall_is_timed_by_the_rank_furthest_behind() -> None:
    assert stall_limit(view(0, S.CONNECTING, S.DOWNLOADING)) == 600
    assert stall_limit(view(0, S.CONNECTING, S.CONNECTING)) == 60
    assert stall_limit(view(0, S.READY, S.READY)) is None


def test_the_missing_ranks_are_named() -> None:
    assert missing_ranks(view(1, S.CONNECTING, S.CONNECTED, S.PENDING)) == [2]
    assert missing_ranks(view(0, S.LOADING, S.LOADED, S.LOADED)) == [0]
