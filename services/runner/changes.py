"""Waking whoever watches something that changes."""

import asyncio


class Changes:
    """Tells any number of watchers that something changed.

    A watcher takes `next` first, looks at the thing, then awaits what it took: no change between
    the look and the wait is missed.
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()

    @property
    def next(self) -> asyncio.Event:
        """An event that is set by the next `notify`."""
        return self._event

    def notify(self) -> None:
        """Wake every watcher."""
        self._event.set()
        self._event = asyncio.Event()
