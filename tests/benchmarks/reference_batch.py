"""mlx-lm's own batch generation by itself, to compare with: one process, several prompts at once.

The process loads the model, warms up, then measures `batch_generate`'s own loop over a
`BatchGenerator`. It may be pinned to one core.
"""

import asyncio
import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path

from tests.benchmarks.measure import Arrivals, Run, run_of

_SECONDS = 300


async def run_batches(
    model: Path,
    prompts: list[list[int]],
    token_count: int,
    batch_sizes: list[int],
    core: int | None = None,
) -> dict[int, Run]:
    """Measure, in one fresh process, generating from all prompts with each of these batch sizes.

    A size below the number of prompts has some wait for others to end. `core`: the only one that
    the process may use.
    """
    task = {
        "prompts": prompts,
        "token_count": token_count,
        "batch_sizes": batch_sizes,
        "core": core,
    }
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.benchmarks.reference_batch", str(model)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(_SECONDS):
            output, _ = await process.communicate(json.dumps(task).encode())
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise RuntimeError(f"mlx-lm failed on {model}; see its words above")
    found = [Run(**one) for one in json.loads(output)]
    return dict(zip(batch_sizes, found, strict=True))


def _main(model_path: str) -> None:
    task = json.load(sys.stdin)
    if task["core"] is not None:
        # Before MLX counts the cores it may use.
        os.sched_setaffinity(0, {task["core"]})
    import mlx.core as mx
    from mlx_lm import load
    from mlx_lm.generate import BatchGenerator

    model, tokenizer = load(model_path)
    ends = [[token] for token in tokenizer.eos_token_ids]

    def generate(prompts: list[list[int]], token_count: int, size: int) -> Run:
        began = time.perf_counter()
        generator = BatchGenerator(
            model, stop_tokens=ends, completion_batch_size=size, prefill_batch_size=size
        )
        uids = generator.insert(prompts, [token_count] * len(prompts))
        places = {uid: place for place, uid in enumerate(uids)}
        tokens: list[list[int]] = [[] for _ in prompts]
        arrivals: list[Arrivals] = [[] for _ in prompts]
        while responses := generator.next_generated():
            now = time.perf_counter()
            for response in responses:
                place = places[response.uid]
                tokens[place].append(response.token)
                arrivals[place].append((now, len(tokens[place])))
        generator.close()
        mx.synchronize(generator.stream)
        return run_of(began, tokens, arrivals)

    size = max(task["batch_sizes"])
    generate([prompt[:4] for prompt in task["prompts"][:size]], 4, size)
    measured = [
        asdict(generate(task["prompts"], task["token_count"], size)) for size in task["batch_sizes"]
    ]
    json.dump(measured, sys.stdout)


if __name__ == "__main__":
    _main(sys.argv[1])
