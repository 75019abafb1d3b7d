"""Watches: snapshot first, resuming, and bounded memory."""

import asyncio

import pytest

from services.common.errors import Reason, ShardringError
from services.topology.domain.model import Change, Topology
from services.topology.watch import ChangeLog, NodeLog
from tests.unit.topology.examples import link, node

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


def came(*node_ids: str) -> Change:
    return Change(updated=tuple(node(node_id) for node_id in node_ids), gathering=True)


async def test_who_follows_nodes_is_told_of_what_came_together_as_one() -> None:
    log = NodeLog(10)
    log.append(11, came("a", "b"))
    log.append(12, Change(relinked=("a",), links=(link("a", "b", "10.0.0.2"),), gathering=True))
    log.append(13, Change(removed=("b", "c"), gathering=True))
    log.append(14, came("c"))
    log.append(15, Change(relinked=("a",), gathering=True))
    events = log.follow(10, lambda: EMPTY)
    change = Change(updated=(node("a"), node("c")), removed=("b",), gathering=True)
    assert await anext(events) == (15, change)
    # Who waits is told of nothing until a node comes or goes, or gathering ends.
    waiting = asyncio.ensure_future(anext(events))
    log.append(16, Change(relinked=("a",), gathering=True))
    log.append(17, Change(gathering=False))
    log.append(18, Change(gathering=False))
    assert await waiting == (18, Change(gathering=False))


async def test_a_snapshot_for_who_follows_nodes_has_no_links() -> None:
    log = NodeLog(10)
    whole = Topology((node("a"),), ((link("a", "b", "10.0.0.2"),),), gathering=True)
    events = log.follow(None, lambda: whole)
    assert await anext(events) == (10, Topology((node("a"),), (), gathering=True))
    log.append(11, came("b"))
    assert await anext(events) == (11, came("b"))
    log.close()
    with pytest.raises(ShardringError) as caught:
        await anext(events)
    assert caught.value.reason is Reason.SHUTTING_DOWN


async def test_changes_of_links_push_no_nodes_out() -> None:
    log = NodeLog(10, max_weight=4)
    log.append(11, came("a"))
    for revision in range(12, 50):
        log.append(revision, Change(relinked=("a",), gathering=True))
    log.append(50, came("b"))
    assert await anext(log.follow(11, lambda: EMPTY)) == (50, came("b"))
    log.append(51, came("c"))
    with pytest.raises(ShardringError) as caught:
        await anext(log.follow(10, lambda: EMPTY))
    assert caught.value.reason is Reason.REVISION_COMPACTED
    assert await anext(log.follow(11, lambda: EMPTY)) == (51, came("b", "c"))
