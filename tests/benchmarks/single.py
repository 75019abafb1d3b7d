"""One node beside mlx-lm's `stream_generate` in a process of its own.

Shardring is measured by a gRPC client of a whole cluster, so that everything between the model and
the client counts: the child's socket, the node's event loop, the stream's messages.
"""

from functools import partial
from pathlib import Path

from tests.benchmarks.cluster import cluster
from tests.benchmarks.compare import compare
from tests.benchmarks.models import LLAMA, TINY_FACTS, prompt
from tests.benchmarks.reference import run_alone
from tests.benchmarks.report import Bar, Figure, Report

BAR = Bar(">=", 0.95)
_ROUNDS = 5
# By model: enough tokens for about two seconds on two slow cores.
_TOKEN_COUNTS = {TINY_FACTS: 450, LLAMA: 32}
_PROMPT = prompt(32)


async def measure(folder: Path, hub: Path) -> Report:
    """Compare the decode rates on each model."""
    report = Report()
    async with cluster(folder, hub, "ada") as lab:
        for model, count in _TOKEN_COUNTS.items():
            name = f"single.{model.partition('/')[2]}"
            instance = await lab.start(model, 1)
            await instance.generate(_PROMPT, 8)
            compared = await compare(
                f"One node, {model}",
                partial(instance.generate, _PROMPT, count),
                partial(run_alone, hub / model, _PROMPT, count),
                _ROUNDS,
            )
            await instance.stop()
            found = compared.report(name, BAR)
            report.tables.extend(found.tables)
            report.figures.extend(
                [*found.figures, Figure(f"{name}.start", instance.start_seconds, "s")]
            )
    return report
