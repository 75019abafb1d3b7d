"""Watches: snapshot first, resuming, and bounded memory."""

import asyncio

import pytest

from services.common.errors import Reason, ShardringError
from services.topology.domain.model import Change, Topology
from services.topology.watch import ChangeLog

EMPTY = Topology((), (), gathering=False)


def change(number: int) -> Change:
    return Change(removed=(f"n{number}",))


@pytest.fixture
def log() -> ChangeLog:
    """Revisions 10 to 15, of which only the changes to 13, 14 and 15 are held."""
    log = ChangeLog(10, max_weight=6)
    for number in range(11, 16):
        log.append(change(number))
    return log


async def test_a_watch_starts_with_a_snapshot_and_goes_on(log: ChangeLog) -> None:
    events = log.follow(None, lambda: EMPTY)
    assert await anext(events) == (15, EMPTY)
    waiting = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0)
    assert not waiting.done()
    log.append(change(16))
    assert await waiting == (16, change(16))


async def test_a_watch_resumes_without_a_snapshot(log: ChangeLog) -> None:
    events = log.follow(12, lambda: EMPTY)
    assert [await anext(events) for _ in range(3)] == [(n, change(n)) for n in (13, 14, 15)]


@pytest.mark.parametrize("revision", [11, 0, -1, 16])
async def test_a_revision_that_is_not_held_is_refused(log: ChangeLog, revision: int) -> None:
    with pytest.raises(ShardringError) as caught:
        await anext(log.follow(revision, lambda: EMPTY))
    assert caught.value.reason is Reason.REVISION_COMPACTED
    assert caught.value.metadata == {"after_revision": str(revision), "oldest_revision": "12"}


async def test_a_slow_watcher_is_told_to_start_again(log: ChangeLog) -> None:
    events = log.follow(None, lambda: EMPTY)
    await anext(events)
    for number in range(16, 100):
        log.append(change(number))
    with pytest.raises(ShardringError) as caught:
        await anext(events)
    assert caught.value.reason is Reason.REVISION_COMPACTED


async def test_a_change_heavier_than_the_log_is_still_passed_on(log: ChangeLog) -> None:
    heavy = Change(removed=tuple(f"n{number}" for number in range(100)))
    events = log.follow(15, lambda: EMPTY)
    log.append(heavy)
    assert await anext(events) == (16, heavy)
    assert (log.oldest, log.newest) == (15, 16)


async def test_closing_ends_watches(log: ChangeLog) -> None:
    events = log.follow(15, lambda: EMPTY)
    waiting = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0)
    log.close()
    with pytest.raises(ShardringError) as caught:
        await waiting
    assert caught.value.reason is Reason.SHUTTING_DOWN
