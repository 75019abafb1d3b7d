"""Whether the machine has anything else to do; call it only while nothing is being measured."""

import asyncio
import os
import time

import psutil

# In cores. A desktop that nobody touches, and an idle cluster, stay below.
_BUSY_CORES = 0.2
_SAMPLE_SECONDS = 1.0


async def is_quiet() -> bool:
    """Watch the whole machine for a second."""
    psutil.cpu_percent()
    await asyncio.sleep(_SAMPLE_SECONDS)
    return psutil.cpu_percent() / 100 * (os.cpu_count() or 1) < _BUSY_CORES


async def until_quiet(seconds: float) -> bool:
    """Wait until the machine is quiet; false when it is not in time."""
    end = time.monotonic() + seconds
    while not (quiet := await is_quiet()) and time.monotonic() < end:
        pass
    return quiet
