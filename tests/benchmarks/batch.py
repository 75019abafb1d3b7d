"""Eight streams at once: on one rank beside mlx-lm's batch generation, and on two beside one core.

Both sides are given the same prompts, other ones in each round, so that no kept prompt helps.
What counts is all tokens over the whole time, from the calls to the last token.
"""

import asyncio
import contextlib
import os
import statistics
from pathlib import Path

from tests.benchmarks.cluster import Instance, cluster
from tests.benchmarks.compare import TOTAL, Comparison, compare
from tests.benchmarks.measure import Run
from tests.benchmarks.models import LLAMA, prompt
from tests.benchmarks.reference_batch import run_batches
from tests.benchmarks.report import Bar, Figure, Report, table

BATCH_BAR = Bar(">=", 0.95)
LANES_BAR = Bar(">=", 1.7)
_STREAMS = 8
_PROMPT_TOKENS = 32
_TOKEN_COUNT = 48
_BATCH_SIZES = [1, 2, 4, 8]
_ROUNDS = 5
_WARM_UP_TURN = 100


async def measure_batch(folder: Path, hub: Path) -> Report:
    """Compare one rank with mlx-lm's batch generation, each free to use all cores."""
    async with cluster(folder, hub, "ada") as lab:
        instance = await lab.start(LLAMA, 1)
        compared = await _compare(
            f"{_STREAMS} streams on one node, {LLAMA}", instance, hub, _STREAMS, core=None
        )
    return compared.report("batch", BATCH_BAR)


async def measure_lanes(folder: Path, hub: Path) -> Report:
    """Compare two ranks with the best that one mlx-lm process on one core gets out of any batch.

    The ranks hold half of the layers, then half of each layer. Two cores can at best be twice one.
    """
    if not hasattr(os, "sched_setaffinity"):
        return Report([table("lanes: needs a system that pins processes to cores", "")])
    core = min(os.sched_getaffinity(0))
    tried = await run_batches(hub / LLAMA, _prompts(0), _TOKEN_COUNT, _BATCH_SIZES, core)
    shown = table(f"{_STREAMS} streams on mlx-lm, pinned to one core", "batch size", "tokens/s")
    for size, run in tried.items():
        shown.add_row(str(size), f"{run.tokens_per_second:.1f}")
    best = max(tried, key=lambda size: tried[size].tokens_per_second)
    report = Report([shown])
    ratios = []
    async with cluster(folder, hub, "ada", "bob") as lab:
        for name, is_tensor in (("pipeline", False), ("tensor", True)):
            instance = await lab.start(LLAMA, 2, tensor=is_tensor)
            title = (
                f"{_STREAMS} streams on two ranks ({name}), {LLAMA}; mlx-lm on one core, "
                f"{best} at a time"
            )
            found, ratio = await _two_ranks(title, f"lanes.{name}", instance, hub, best, core)
            await instance.stop()
            report.tables.extend(found.tables)
            report.figures.extend(found.figures)
            ratios.append(ratio)
    report.figures.append(Figure("lanes.ratio", max(ratios), "of the two", LANES_BAR))
    return report


async def _two_ranks(
    title: str, name: str, instance: Instance, hub: Path, batch_size: int, core: int
) -> tuple[Report, float]:
    """Compare, and note what part of the time each rank computes; return the ratio beside."""
    seen: list[list[float]] = [[], []]
    watching = asyncio.create_task(instance.busy_fractions(seen))
    try:
        compared = await _compare(title, instance, hub, batch_size, core)
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
    report = compared.report(name)
    for rank, shares in enumerate(seen):
        busy = statistics.median(shares) * 100
        report.figures.append(Figure(f"{name}.rank{rank}.busy", busy, "% of the time"))
    return report, next(f.value for f in report.figures if f.name == f"{name}.ratio")


async def _compare(
    title: str, instance: Instance, hub: Path, batch_size: int, core: int | None
) -> Comparison:
    await instance.generate_all(_prompts(_WARM_UP_TURN), 4)

    async def ours(turn: int) -> Run:
        return await instance.generate_all(_prompts(turn), _TOKEN_COUNT)

    async def theirs(turn: int) -> Run:
        prompts = _prompts(turn)
        found = await run_batches(hub / LLAMA, prompts, _TOKEN_COUNT, [batch_size], core)
        return found[batch_size]

    return await compare(title, ours, theirs, _ROUNDS, TOTAL)


def _prompts(turn: int) -> list[list[int]]:
    """Return a prompt for each stream, which no other turn has."""
    return [prompt(_PROMPT_TOKENS, turn * _STREAMS + stream) for stream in range(_STREAMS)]
