"""One node beside mlx-lm's `stream_generate` in a process of its own.

Shardring is measured by a gRPC client of a whole cluster, so that everything between the model and
the client counts: the child's socket, the node's event loop, the stream's messages.
"""

from pathlib import Path

from tests.benchmarks.cluster import Cluster, cluster
from tests.benchmarks.compare import compare
from tests.benchmarks.measure import Run
from tests.benchmarks.models import LLAMA, TINY_FACTS, prompt
from tests.benchmarks.reference import run_alone
from tests.benchmarks.report import Bar, Figure, Report

BAR = Bar(">=", 0.97)
_ROUNDS = 5
# By model: enough tokens for about two seconds on two slow cores.
_TOKEN_COUNTS = {TINY_FACTS: 450, LLAMA: 32}
_PROMPT_TOKENS = 32
_WARM_UP_TURN = 1000


async def measure(folder: Path, hub: Path) -> Report:
    """Compare the decode rates on each model."""
    report = Report()
    async with cluster(folder, hub, "ada") as lab:
        for model, count in _TOKEN_COUNTS.items():
            found = await _measure_model(lab, hub, model, count)
            report.tables.extend(found.tables)
            report.figures.extend(found.figures)
    return report


async def _measure_model(lab: Cluster, hub: Path, model: str, token_count: int) -> Report:
    name = f"single.{model.partition('/')[2]}"
    instance = await lab.start(model, 1)
    await instance.generate(prompt(_PROMPT_TOKENS, _WARM_UP_TURN), 8)

    async def ours(turn: int) -> Run:
        return await instance.generate(prompt(_PROMPT_TOKENS, turn), token_count)

    async def theirs(turn: int) -> Run:
        return await run_alone(hub / model, prompt(_PROMPT_TOKENS, turn), token_count)

    compared = await compare(f"One node, {model}", ours, theirs, _ROUNDS)
    await instance.stop()
    report = compared.report(name, BAR)
    report.figures.append(Figure(f"{name}.start", instance.start_seconds, "s"))
    return report
