"""Loading a shard of a 2 GB model: how long beside reading its bytes, and how much memory at most.

The shard's process is a real one, told what its supervisor tells it. Its peak is what the system
says of it once it has loaded, less what it says right before: by then it runs, with MLX, and holds
nothing. The bytes are those of the shard's own layers.

Linux only: elsewhere neither the peak nor the page cache can be asked for.
"""

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from services.runner.adapters.child import ChildProcess, start_child
from services.runner.child_protocol import Connect, Connected, Event, Load, Loaded
from tests.benchmarks.measure import spread
from tests.benchmarks.quiet import until_quiet
from tests.benchmarks.report import Bar, Figure, Report, table
from tests.benchmarks.weights import (
    LAYER_BYTES,
    LAYER_COUNT,
    Extent,
    layer_extents,
    write_random_llama,
)

MEMORY_BAR = Bar("<", 1.1)
SPEED_BAR = Bar(">=", 0.8)
# A middle rank's of three: its layers begin and end amid files.
_START, _END = 7, 15
_ROUNDS = 3
_SECONDS = 120
_WAIT_SECONDS = 15.0
_PIECE_BYTES = 2**24
# What key-value caches might take; none is made here.
_CACHE_BYTES = 2**30


@dataclass(frozen=True)
class _Loaded:
    seconds: float
    peak_bytes: int


async def measure(folder: Path, hub: Path) -> Report:
    """Load a shard and read its bytes in turns, with nothing and with all in the page cache."""
    if not sys.platform.startswith("linux"):
        return Report([table("loading: needs Linux", "")])
    await asyncio.to_thread(write_random_llama, folder)
    extents = layer_extents(folder, _START, _END)
    size = (_END - _START) * LAYER_BYTES
    report = Report()
    shown = table(
        f"Layers {_START} to {_END} of {LAYER_COUNT}, {size / 1e9:.2f} GB, "
        f"median (least to greatest) of {_ROUNDS} rounds",
        "page cache",
        "loaded, GB/s",
        "read, GB/s",
        "ratio",
        "peak, of its layers' bytes",
    )
    for cache in ("cold", "warm"):
        loads, reads = [], []
        disturbed = False
        for turn in range(_ROUNDS):
            disturbed |= not await until_quiet(_WAIT_SECONDS)
            for side in ("load", "read") if turn % 2 else ("read", "load"):
                await asyncio.to_thread(_prepare_cache, extents, cache == "warm")
                if side == "load":
                    loads.append(await _load(folder))
                else:
                    reads.append(await asyncio.to_thread(_read, extents))
        ratio = spread([b / a.seconds for a, b in zip(loads, reads, strict=True)])
        peak = spread([one.peak_bytes / size for one in loads])
        shown.add_row(
            cache,
            f"{spread([size / one.seconds / 1e9 for one in loads]):.2f}",
            f"{spread([size / seconds / 1e9 for seconds in reads]):.2f}",
            f"{ratio:.2f}",
            f"{peak:.3f}",
        )
        name = f"loading.{cache}"
        speed_bar = SPEED_BAR if cache == "cold" else None
        unit = "of reading the same bytes"
        report.figures.append(
            Figure(f"{name}.speed", ratio.median, unit, speed_bar, disturbed=disturbed)
        )
        report.figures.append(Figure(f"{name}.peak", peak.high, "of its layers' bytes", MEMORY_BAR))
    report.tables.append(shown)
    return report


async def _load(folder: Path) -> _Loaded:
    child = await start_child("loading", 1, "node", {})
    try:
        async with asyncio.timeout(_SECONDS):
            events = child.events()
            child.send(Connect(1, ()))
            await _next(events, Connected, child)
            before = _peak_bytes(child.pid)
            began = time.perf_counter()
            child.send(Load(str(folder), _START, _END, tensor=False, cache_limit_bytes=2**30))
            await _next(events, Loaded, child)
            return _Loaded(time.perf_counter() - began, _peak_bytes(child.pid) - before)
    finally:
        await child.kill()


async def _next(events: AsyncIterator[Event], wanted: type[Event], child: ChildProcess) -> None:
    event = await anext(events, None)
    if not isinstance(event, wanted):
        raise RuntimeError(f"{event} instead of {wanted.__name__}: {child.last_words}")


def _peak_bytes(pid: int) -> int:
    """Return the most memory that a process ever had resident."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def _prepare_cache(extents: list[Extent], warm: bool) -> None:
    """Have the page cache hold all of these bytes, or none of their files."""
    for path in {extent.path for extent in extents}:
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    if warm:
        _read(extents)


def _read(extents: list[Extent]) -> float:
    """Read these bytes once, from the first to the last; return the seconds it takes."""
    piece = memoryview(bytearray(_PIECE_BYTES))
    began = time.perf_counter()
    for extent in extents:
        with extent.path.open("rb", buffering=0) as file:
            file.seek(extent.start)
            left = extent.end - extent.start
            while left:
                count = file.readinto(piece[: min(left, _PIECE_BYTES)])
                if not count:
                    raise RuntimeError(f"{extent.path} is too short")
                left -= count
    return time.perf_counter() - began
