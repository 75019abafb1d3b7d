"""Two and three ranks beside mlx-lm's own pipeline, which runs in lock step; one stream.

Both are as many processes in an MLX ring on this machine's loopback, with the layers cut evenly, on
a model that mlx-lm can pipeline.
"""

from pathlib import Path

from tests.benchmarks.cluster import Cluster, cluster
from tests.benchmarks.compare import compare
from tests.benchmarks.measure import Run
from tests.benchmarks.models import QWEN2, prompt
from tests.benchmarks.reference import run_pipeline
from tests.benchmarks.report import Bar, Figure, Report

BAR = Bar(">=", 1.1)
_NODES = ("ada", "bob", "cyd")
_ROUNDS = 5
_TOKEN_COUNT = 32
_PROMPT_TOKENS = 32
_WARM_UP_TURN = 1000


async def measure(folder: Path, hub: Path) -> Report:
    """Compare decode rate and time to the first token."""
    report = Report()
    async with cluster(folder, hub, *_NODES) as lab:
        for ranks in (2, 3):
            found = await _measure_ranks(lab, hub, ranks)
            report.tables.extend(found.tables)
            report.figures.extend(found.figures)
    return report


async def _measure_ranks(lab: Cluster, hub: Path, ranks: int) -> Report:
    instance = await lab.start(QWEN2, ranks)
    await instance.generate(prompt(_PROMPT_TOKENS, _WARM_UP_TURN), 8)

    async def ours(turn: int) -> Run:
        return await instance.generate(prompt(_PROMPT_TOKENS, turn), _TOKEN_COUNT)

    async def theirs(turn: int) -> Run:
        prompted = prompt(_PROMPT_TOKENS, turn)
        return await run_pipeline(hub / QWEN2, prompted, _TOKEN_COUNT, ranks)

    compared = await compare(f"{ranks} ranks, {QWEN2}", ours, theirs, _ROUNDS)
    await instance.stop()
    report = compared.report(f"ring.{ranks}", BAR)
    report.figures.append(Figure(f"ring.{ranks}.start", instance.start_seconds, "s"))
    return report
