"""Threads for what waits on the hub, apart from those that the whole process shares."""

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

# Enough for a few models at once; more wait their turn.
_THREADS = 8

P = ParamSpec("P")
R = TypeVar("R")


class HubThreads:
    """Runs blocking calls that may wait on the hub for as long as it likes.

    In the threads of `asyncio.to_thread` a few hanging calls would hold up all else that blocks,
    a node's heartbeats among it.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="hub")

    async def run(self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Return what `call` returns. Cancelling leaves a call that has begun to end by itself."""
        context = contextvars.copy_context()
        return await asyncio.get_running_loop().run_in_executor(
            self._pool, lambda: context.run(call, *args, **kwargs)
        )

    def close(self) -> None:
        """Begin no further call."""
        self._pool.shutdown(wait=False, cancel_futures=True)
