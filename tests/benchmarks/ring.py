"""Three ranks beside mlx-lm's own pipeline, which runs in lock step.

Both are three processes in an MLX ring on this machine's loopback, with the layers cut evenly, on
a model that mlx-lm can pipeline.
"""

from functools import partial
from pathlib import Path

from tests.benchmarks.cluster import cluster
from tests.benchmarks.compare import compare
from tests.benchmarks.models import QWEN2, prompt
from tests.benchmarks.reference import run_pipeline
from tests.benchmarks.report import Figure, Report

_RANKS = ("ada", "bob", "cyd")
_ROUNDS = 5
_TOKEN_COUNT = 32
_PROMPT = prompt(32)


async def measure(folder: Path, hub: Path) -> Report:
    """Compare decode rate and time to the first token."""
    async with cluster(folder, hub, *_RANKS) as lab:
        instance = await lab.start(QWEN2, len(_RANKS))
        await instance.generate(_PROMPT, 8)
        compared = await compare(
            f"Three ranks, {QWEN2}",
            partial(instance.generate, _PROMPT, _TOKEN_COUNT),
            partial(run_pipeline, hub / QWEN2, _PROMPT, _TOKEN_COUNT, len(_RANKS)),
            _ROUNDS,
        )
        await instance.stop()
    report = compared.report("ring")
    report.figures.append(Figure("ring.start", instance.start_seconds, "s"))
    return report
