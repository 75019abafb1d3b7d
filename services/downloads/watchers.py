"""Telling watchers which downloads changed, a few times a second at most."""

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from services.common.errors import Reason, ShardringError

COALESCE_SECONDS = 0.25


class Watch:
    """The ids that changed since this watcher last took them.

    A watcher sends the newest record of each, so nothing queues up behind a slow reader and the
    last message about a download is exact.
    """

    def __init__(self) -> None:
        self._changed: set[str] = set()
        self._wake = asyncio.Event()
        self._closed = False

    async def changed(self) -> set[str]:
        """Wait until something changed, then a moment for more; raise SHUTTING_DOWN at the end."""
        while not self._changed:
            if self._closed:
                raise ShardringError(
                    Reason.SHUTTING_DOWN, "The downloads service is stopping; watch again."
                )
            self._wake.clear()
            await self._wake.wait()
        if not self._closed:
            await asyncio.sleep(COALESCE_SECONDS)
        taken, self._changed = self._changed, set()
        return taken

    def add(self, ids: set[str]) -> None:
        """Note changed ids."""
        self._changed |= ids
        self._wake.set()

    def close(self) -> None:
        """Let the watcher take what there is, then end."""
        self._closed = True
        self._wake.set()


class Watchers:
    """All watches, and the revision of what they watch."""

    def __init__(self) -> None:
        self._watches: set[Watch] = set()
        self.revision = 0

    def publish(self, download_ids: Iterable[str]) -> None:
        """Note that these downloads changed."""
        self.revision += 1
        ids = set(download_ids)
        for watch in self._watches:
            watch.add(ids)

    @contextmanager
    def watch(self) -> Iterator[Watch]:
        """Collect changes from now on, until the context is left."""
        watch = Watch()
        self._watches.add(watch)
        try:
            yield watch
        finally:
            self._watches.discard(watch)

    def close(self) -> None:
        """End every watch."""
        for watch in self._watches:
            watch.close()
