"""The log of recent changes that watchers follow, each with a cursor of its own.

A slow watcher holds no queue: when the log has moved past its cursor it is told to start again,
so that memory stays bounded however many watchers there are.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace

from services.common.errors import Reason, ShardringError
from services.topology.domain.model import Change, Node, Topology

# Nodes and links in all held changes together: twice a full mesh of 256 nodes.
MAX_WEIGHT = 131_072
# For so long changes of nodes are gathered for those who follow nothing else.
GATHER_SECONDS = 0.2


class ChangeLog:
    """The changes after `oldest` up to the newest revision, as many as `max_weight` allows."""

    def __init__(self, revision: int, max_weight: int = MAX_WEIGHT) -> None:
        self.oldest = revision
        self.newest = revision
        self._max_weight = max_weight
        self._weight = 0
        self._changes: deque[Change] = deque()
        self._moved = asyncio.Event()
        self._closed = False

    def append(self, change: Change) -> None:
        """Add the change that leads to the next revision, and wake the watchers."""
        self._changes.append(change)
        self._weight += change.weight()
        self.newest += 1
        # The newest change is always kept, whatever its weight.
        while self._weight > self._max_weight and len(self._changes) > 1:
            self._weight -= self._changes.popleft().weight()
            self.oldest += 1
        self._wake()

    def close(self) -> None:
        """End all watches: the service is stopping."""
        self._closed = True
        self._wake()

    async def follow(
        self, after_revision: int | None, snapshot: Callable[[], Topology]
    ) -> AsyncGenerator[tuple[int, Topology | Change]]:
        """Yield (revision, what happened): a snapshot unless resuming, then each change.

        Raises REVISION_COMPACTED when `after_revision`, or the last one a slow watcher took, is
        no longer (or not yet) held, and SHUTTING_DOWN at the end.
        """
        cursor = self.newest if after_revision is None else after_revision
        if after_revision is None:
            yield cursor, snapshot()
        while not self._closed:
            if not self.oldest <= cursor <= self.newest:
                raise _compacted(cursor, self.oldest)
            if cursor == self.newest:
                await self._moved.wait()
                continue
            change = self._changes[cursor - self.oldest]
            cursor += 1
            yield cursor, change
        raise _stopping()

    def _wake(self) -> None:
        self._moved.set()
        self._moved = asyncio.Event()


class NodeLog:
    """The same for those who follow nodes alone, as all agents do: without links.

    Whatever came within a moment is one change for them: while n nodes come, each of them is told
    of the others some times rather than n times.
    """

    def __init__(self, revision: int, max_weight: int = MAX_WEIGHT) -> None:
        self.oldest = revision
        self.newest = revision
        self._max_weight = max_weight
        self._weight = 0
        self._changes: deque[tuple[int, Change]] = deque()
        # What every change repeats; when only that is different, it is still a change.
        self._repeated: tuple[object, ...] = (True, ())
        self._merged: tuple[tuple[int, int], Change] = ((0, 0), Change())
        self._moved = asyncio.Event()
        self._closed = False

    def append(self, revision: int, change: Change) -> None:
        """Add the change that leads to this revision; wake the watchers if it is about nodes."""
        self.newest = revision
        before, self._repeated = self._repeated, (change.gathering, change.conflicts)
        if not change.updated and not change.removed and self._repeated == before:
            return
        change = replace(change, relinked=(), links=(), misdirections=(), one_way=frozenset())
        self._changes.append((revision, change))
        self._weight += change.weight()
        while self._weight > self._max_weight and len(self._changes) > 1:
            self.oldest, dropped = self._changes.popleft()
            self._weight -= dropped.weight()
        self._wake()

    def close(self) -> None:
        """End all watches: the service is stopping."""
        self._closed = True
        self._wake()

    async def follow(
        self, after_revision: int | None, snapshot: Callable[[], Topology]
    ) -> AsyncGenerator[tuple[int, Topology | Change]]:
        """Yield (revision, what happened) as ChangeLog.follow, several changes as one."""
        cursor = self.newest if after_revision is None else after_revision
        if after_revision is None:
            whole = snapshot()
            yield cursor, replace(whole, links_by_source=(), misdirections=(), one_way=frozenset())
        while not self._closed:
            if not self.oldest <= cursor <= self.newest:
                raise _compacted(cursor, self.oldest)
            if not self._changes or self._changes[-1][0] <= cursor:
                await self._moved.wait()
                # All of them at the same moments, so that they share what they are told.
                now = asyncio.get_running_loop().time()
                await asyncio.sleep(GATHER_SECONDS - now % GATHER_SECONDS)
                continue
            change = self._since(cursor)
            cursor = self.newest
            yield cursor, change
        raise _stopping()

    def _since(self, revision: int) -> Change:
        key = (revision, self.newest)
        if self._merged[0] != key:
            newer = [change for r, change in self._changes if r > revision]
            self._merged = (key, _merge(newer))
        return self._merged[1]

    def _wake(self) -> None:
        self._moved.set()
        self._moved = asyncio.Event()


def _merge(changes: Sequence[Change]) -> Change:
    """Return successive changes of nodes as one."""
    if len(changes) == 1:
        return changes[0]
    updated: dict[str, Node] = {}
    removed: dict[str, None] = {}
    for change in changes:
        for node in change.updated:
            updated[node.node_id] = node
            removed.pop(node.node_id, None)
        for node_id in change.removed:
            updated.pop(node_id, None)
            removed[node_id] = None
    return replace(changes[-1], updated=tuple(updated.values()), removed=tuple(removed))


def _compacted(cursor: int, oldest: int) -> ShardringError:
    return ShardringError(
        Reason.REVISION_COMPACTED,
        f"Changes after revision {cursor} are not held; start again from a snapshot.",
        metadata={"after_revision": cursor, "oldest_revision": oldest},
    )


def _stopping() -> ShardringError:
    return ShardringError(Reason.SHUTTING_DOWN, "The topology service is stopping.")
