"""What one rank knows of every rank's shard, its own included."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from services.common.errors import Reason, ShardringError
from services.runner.changes import Changes
from services.runner.domain import faults
from services.runner.domain.ring import Rank, Ring
from services.runner.domain.state import ShardState
from services.runner.views import ShardView


class Sibling(Protocol):
    """Another rank's shard, on its own node."""

    async def follow(self, on_change: Callable[[ShardView], None]) -> None:
        """Report the shard at each change until it ended. Raises when its node is lost."""
        ...


class RingViews:
    """The shards of one ring as `rank` sees them. `changes` tells when they differ."""

    def __init__(self, ring: Ring, rank: Rank, changes: Changes) -> None:
        now = time.time()
        self._ring, self._rank, self._changes = ring, rank, changes
        self.by_rank = {r.rank: ShardView(r.rank, ShardState.PENDING, now) for r in ring.ranks}

    @property
    def mine(self) -> ShardView:
        """This rank's own shard."""
        return self.by_rank[self._rank.rank]

    @property
    def others(self) -> dict[int, ShardState]:
        """The states of all other ranks."""
        return {rank: v.state for rank, v in self.by_rank.items() if rank != self._rank.rank}

    @property
    def error(self) -> ShardringError | None:
        """Why the instance failed, as far as this rank knows."""
        return next((view.error for view in self.by_rank.values() if view.error), None)

    def note(self, **changed: Any) -> None:
        """Change this rank's own view and wake whoever watches it."""
        before = self.mine
        if error := changed.get("error"):
            changed["error"] = error.bare()
        after = replace(before, **changed)
        if after.state is not before.state:
            after = replace(after, state_time=time.time())
        self.take(after)

    def take(self, view: ShardView) -> None:
        """Note what a shard is like."""
        self.by_rank[view.rank] = view
        self._changes.notify()

    async def follow(self, rank: int, sibling: Sibling) -> None:
        """Keep up with a sibling until it ended; one whose node is lost counts as FAILED."""
        try:
            await sibling.follow(self.take)
        except ShardringError as error:
            if error.reason is Reason.NODE_LOST:
                error.metadata |= {"rank": str(rank), "phase": self.by_rank[rank].state.name}
            self._fail(self.by_rank[rank], error)

    def note_stopped(self, rank: int) -> None:
        """Note that a sibling's node said that its shard is gone, or never was."""
        view = self.by_rank[rank]
        if not view.state.ended:
            self.take(replace(view, state=ShardState.STOPPED, memory_bytes=0, usage=None))

    async def all_ended(self) -> None:
        """Return when every rank has ended."""
        while not all(view.state.ended for view in self.by_rank.values()):
            await self._changes.next.wait()

    def give_up(self) -> None:
        """List no rank as alive that nobody follows any more."""
        for view in list(self.by_rank.values()):
            if not view.state.ended:
                unseen = faults.node_lost(
                    self._ring.ranks[view.rank], view.state, "was not seen to end"
                )
                self._fail(view, self.mine.error or unseen)

    def cause(self) -> ShardringError:
        """Return the error of the sibling that failed, naming it."""
        view = next(v for v in self.by_rank.values() if v.state is ShardState.FAILED)
        rank = self._ring.ranks[view.rank]
        return view.error or faults.shard_failed(rank, view.state, "it did not say why")

    def _fail(self, view: ShardView, error: ShardringError) -> None:
        self.take(
            replace(
                view,
                state=ShardState.FAILED,
                state_time=time.time(),
                memory_bytes=0,
                usage=None,
                error=error.bare(),
            )
        )
