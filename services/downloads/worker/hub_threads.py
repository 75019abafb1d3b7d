"""Threads for what waits on the hub, apart from those that the whole process shares."""

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from services.downloads.worker.patience import Patience, with_patience

# Enough for a few models at once; more wait their turn.
_THREADS = 8

P = ParamSpec("P")
R = TypeVar("R")


class HubThreads:
    """Runs blocking calls that may wait on the hub, each for as long as `patience_seconds` allow.

    In the threads of `asyncio.to_thread` a few hanging calls would hold up all else that blocks,
    a node's heartbeats among it.
    """

    def __init__(self, patience_seconds: float) -> None:
        self._patience_seconds = patience_seconds
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="hub")
        self._waiting: set[Patience] = set()

    async def run(self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Return what `call` returns. Cancelling leaves a call that has begun to end by itself,
        which it does at its next look at its patience."""
        context = contextvars.copy_context()
        given = Patience(self._patience_seconds)

        def patiently() -> R:
            with with_patience(given):
                return call(*args, **kwargs)

        self._waiting.add(given)
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._pool, lambda: context.run(patiently)
            )
        finally:
            self._waiting.discard(given)
            given.end()

    def close(self) -> None:
        """Begin no further call, and end the waiting of those that run."""
        for given in self._waiting:
            given.end()
        self._pool.shutdown(wait=False, cancel_futures=True)
