"""What other threads tell the thread that computes, which may be asleep in the ring meanwhile."""

import os
import queue
from contextlib import suppress
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Inbox(Generic[Item]):
    """A queue with a descriptor that can be read from while there is something in it."""

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        os.set_blocking(self._reading, False)

    @property
    def descriptor(self) -> int:
        """Can be read from while there is something to take."""
        return self._reading

    def put(self, item: Item) -> None:
        """Add an item. From any thread."""
        self._items.put(item)
        with suppress(BlockingIOError):  # full of such notes already
            os.write(self._writing, b"\0")

    def take(self) -> list[Item]:
        """Return what there is, without waiting."""
        # Items are added before they are noted, so none is left behind a note that was read.
        with suppress(BlockingIOError):
            os.read(self._reading, 65536)
        items = []
        while not self._items.empty():
            items.append(self._items.get())
        return items
