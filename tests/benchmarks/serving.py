"""Running a module as a process, and what it takes of a core."""

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psutil

_START_SECONDS = 120


def give_way() -> None:
    """Run only when nobody else wants the processor, as for simulated nodes, which in fact have
    machines of their own."""
    if hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    else:
        os.nice(19)


@asynccontextmanager
async def module(*command: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """Run a module as a process; yield it and the first line it says."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", *command, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(_START_SECONDS):
            line = (await process.stdout.readline()).decode().strip()
        yield process, line
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


async def cpu_percent(process: psutil.Process, seconds: float) -> float:
    """Return what a process takes of a core for so long."""
    before = process.cpu_times()
    began = time.perf_counter()
    await asyncio.sleep(seconds)
    after = process.cpu_times()
    busy = after.user - before.user + after.system - before.system
    return float(busy / (time.perf_counter() - began) * 100)
