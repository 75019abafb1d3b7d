"""What one rank knows of every rank's shard, and how it is told to others."""

import asyncio
from collections.abc import Callable

import pytest

from services.common.addresses import HostPort
from services.common.errors import Reason, ShardringError
from services.runner.changes import Changes
from services.runner.domain.ring import Rank, Ring
from services.runner.domain.state import ShardState
from services.runner.ring_views import RingViews
from services.runner.rpc.convert import instance_to_proto, shard_from_proto, shard_to_proto
from services.runner.views import InstanceLoad, InstanceView, ShardUsage, ShardView

USAGE = ShardUsage(0.5, 1000, 4000, 300)
RING = Ring(
    "org/m",
    "c0ffee",
    8,
    tuple(
        Rank(
            rank,
            f"id-{rank}",
            f"n{rank}",
            (HostPort("10.0.0.1", 1),),
            (4 * rank, 4 * rank + 4),
            ("h:1", "h:2"),
            1,
        )
        for rank in range(2)
    ),
)


class Told:
    """A sibling that tells `views`, then ends or is lost."""

    def __init__(self, *views: ShardView, lost: ShardringError | None = None) -> None:
        self.views, self.lost = views, lost

    async def follow(self, on_change: Callable[[ShardView], None]) -> None:
        for view in self.views:
            on_change(view)
        if self.lost:
            raise self.lost


@pytest.fixture
def views() -> RingViews:
    return RingViews(RING, RING.ranks[0], Changes())


def test_a_change_of_ones_own_wakes_watchers_and_dates_the_state(views: RingViews) -> None:
    changes = Changes()
    views = RingViews(RING, RING.ranks[0], changes)
    woken, before = changes.next, views.mine.state_time
    views.note(memory_bytes=7)
    assert woken.is_set()
    assert (views.mine.memory_bytes, views.mine.state_time) == (7, before)
    views.note(state=ShardState.READY)
    assert views.mine.state_time > before
    assert views.others == {1: ShardState.PENDING}


async def test_a_lost_sibling_has_failed_in_its_phase(views: RingViews) -> None:
    ready = ShardView(1, ShardState.READY, 1.0, memory_bytes=9, usage=USAGE)
    lost = ShardringError(Reason.NODE_LOST, "Node n1 is lost.")
    await views.follow(1, Told(ready, lost=lost))
    view = views.by_rank[1]
    assert (view.state, view.memory_bytes, view.usage) == (ShardState.FAILED, 0, None)
    assert view.error is not None
    assert view.error.metadata == {"rank": "1", "phase": "READY"}
    assert views.cause() == view.error
    assert views.error == view.error


async def test_what_a_failed_sibling_told_is_the_cause_and_its_log_is_kept(
    views: RingViews,
) -> None:
    error = ShardringError(Reason.SHARD_FAILED, "Rank 1 broke.")
    failed = ShardView(1, ShardState.FAILED, 1.0, error, log_lines=("last words",))
    await views.follow(1, Told(failed))
    assert views.cause() is error
    assert views.by_rank[1].log_lines == ("last words",)


async def test_nobody_is_listed_as_alive_in_the_end(views: RingViews) -> None:
    waiting = asyncio.create_task(views.all_ended())
    views.note(state=ShardState.STOPPED)
    views.give_up()
    await asyncio.wait_for(waiting, 10)
    error = views.by_rank[1].error
    assert error is not None
    assert error.reason is Reason.NODE_LOST
    views.note_stopped(1)
    assert views.by_rank[1].state is ShardState.FAILED, "what has ended stays as it ended"


def test_a_sibling_that_stopped(views: RingViews) -> None:
    views.take(ShardView(1, ShardState.READY, 1.0, memory_bytes=9, usage=USAGE))
    views.note_stopped(1)
    view = views.by_rank[1]
    assert (view.state, view.memory_bytes, view.usage) == (ShardState.STOPPED, 0, None)


@pytest.mark.parametrize("usage", [None, ShardUsage(), USAGE])
def test_a_shard_and_its_message(usage: ShardUsage | None) -> None:
    view = ShardView(1, ShardState.READY, 5.0, None, 9, 1.0, usage=usage, log_lines=("one", "two"))
    assert shard_from_proto(shard_to_proto("chat", RING.ranks[1], view)) == view


@pytest.mark.parametrize("load", [None, InstanceLoad(), InstanceLoad(3, 1, 812.0, 52.5, 2.5)])
def test_an_instances_load_and_its_message(load: InstanceLoad | None) -> None:
    shards = tuple(ShardView(rank, ShardState.READY, 5.0, log_lines=("line",)) for rank in range(2))
    view = InstanceView("chat", RING, 0, shards, 1.0, load=load)
    message = instance_to_proto(view)
    assert message.HasField("load") == (load is not None)
    if load is not None:
        told = {field.name: value for field, value in message.load.ListFields()}
        assert told == {name: value for name, value in vars(load).items() if value}
    assert [list(shard.log_lines) for shard in message.shards] == [["line"], ["line"]]
    bare = instance_to_proto(view.without_logs())
    assert [list(shard.log_lines) for shard in bare.shards] == [[], []]
