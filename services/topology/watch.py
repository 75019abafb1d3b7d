"""The log of recent changes that watchers follow, each with a cursor of its own.

A slow watcher holds no queue: when the log has moved past its cursor it is told to start again,
so that memory stays bounded however many watchers there are.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable

from services.common.errors import Reason, ShardringError
from services.topology.domain.model import Change, Topology

# Nodes and links in all held changes together.
MAX_WEIGHT = 50_000


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
                raise ShardringError(
                    Reason.REVISION_COMPACTED,
                    f"Changes after revision {cursor} are not held; start again from a snapshot.",
                    metadata={"after_revision": cursor, "oldest_revision": self.oldest},
                )
            if cursor == self.newest:
                await self._moved.wait()
                continue
            change = self._changes[cursor - self.oldest]
            cursor += 1
            yield cursor, change
        raise ShardringError(Reason.SHUTTING_DOWN, "The topology service is stopping.")

    def _wake(self) -> None:
        self._moved.set()
        self._moved = asyncio.Event()
