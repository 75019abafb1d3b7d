"""Time to the first token of a long prompt over three ranks: in chunks, and in one piece.

Both sides are Shardring, the second with chunks longer than the prompt, so that each stage waits
for the whole prompt of the one before. Their rings stand side by side and are asked in turns.
"""

from pathlib import Path

from services.common.addresses import HostPort
from services.common.channel import Remote
from tests.benchmarks.compare import Rate, compare
from tests.benchmarks.generate import generate_all
from tests.benchmarks.measure import Run
from tests.benchmarks.models import LLAMA_LONG, prompt
from tests.benchmarks.report import Bar, Report
from tests.benchmarks.runners import INSTANCE_ID, running

BAR = Bar(">=", 1.5)
_PROMPT_TOKENS = 2000
_CUTS = [0, 4, 8, 12]
_ROUNDS = 5
_WARM_UP_TURN = 100
_RATE = Rate("prompt", lambda run: _PROMPT_TOKENS / run.first_token_seconds)


async def measure(folder: Path, hub: Path) -> Report:
    """Compare how long the first token takes."""
    model = hub / LLAMA_LONG
    async with (
        running(model, _CUTS, "services.runner.child") as chunked,
        running(model, _CUTS, "tests.benchmarks.whole_prompt_child") as whole,
    ):
        heads = [
            Remote("the head", [HostPort("127.0.0.1", ring.port)]) for ring in (chunked, whole)
        ]

        async def ask(head: Remote, turn: int) -> Run:
            return await generate_all(head, INSTANCE_ID, [prompt(_PROMPT_TOKENS, turn)], 2)

        try:
            for head in heads:
                await generate_all(head, INSTANCE_ID, [prompt(32, _WARM_UP_TURN)], 2)
            compared = await compare(
                f"{len(_CUTS) - 1} ranks, a prompt of {_PROMPT_TOKENS} tokens",
                lambda turn: ask(heads[0], turn),
                lambda turn: ask(heads[1], turn),
                _ROUNDS,
                _RATE,
                ("chunked", "whole"),
            )
        finally:
            for head in heads:
                await head.close()
    return compared.report("prefill", BAR)
