"""mlx-lm by itself, to compare with: `stream_generate` in processes of their own.

Alone, or as mlx-lm's own pipeline with one process a rank, joined in an MLX ring on loopback.
Each process loads the model, warms up with a short generation, then measures one generation.
"""

import asyncio
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from tests.benchmarks.measure import Run
from tests.benchmarks.runners import free_ports

_SECONDS = 120


async def run_alone(model: Path, prompt: list[int], token_count: int) -> Run:
    """Measure mlx-lm in one fresh process."""
    return (await _run([model], prompt, token_count, hosts=[]))[0]


async def run_pipeline(model: Path, prompt: list[int], token_count: int, ranks: int) -> Run:
    """Measure mlx-lm's pipeline in `ranks` fresh processes; what rank 0 sees."""
    hosts = [f"127.0.0.1:{port}" for port in free_ports(ranks)]
    return (await _run([model] * ranks, prompt, token_count, hosts))[0]


async def _run(
    models: list[Path], prompt: list[int], token_count: int, hosts: list[str]
) -> list[Run]:
    task = json.dumps({"prompt": prompt, "token_count": token_count}).encode()
    with tempfile.NamedTemporaryFile("w", suffix=".json") as host_file:
        json.dump([[host] for host in hosts], host_file)
        host_file.flush()
        environment = dict(os.environ)
        if hosts:
            environment["MLX_HOSTFILE"] = host_file.name
        processes = [
            await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tests.benchmarks.reference", str(model)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=environment | {"MLX_RANK": str(rank)},
            )
            for rank, model in enumerate(models)
        ]
        try:
            async with asyncio.timeout(_SECONDS):
                outputs = await asyncio.gather(*(p.communicate(task) for p in processes))
        finally:
            for process in processes:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
    if any(process.returncode for process in processes):
        raise RuntimeError(f"mlx-lm failed on {models[0]}; see its words above")
    return [Run(**json.loads(output)) for output, _ in outputs]


def _main(model_path: str) -> None:
    import mlx.core as mx
    from mlx_lm import load, stream_generate
    from mlx_lm.generate import generation_stream
    from mlx_lm.utils import sharded_load

    task = json.load(sys.stdin)
    group = None
    if "MLX_HOSTFILE" in os.environ:
        group = mx.distributed.init(backend="ring", strict=True)
        model, tokenizer = sharded_load(model_path, pipeline_group=group)
    else:
        model, tokenizer = load(model_path)

    def meet() -> None:
        # mlx-lm begins a step beyond the last token; no rank may leave while others are in it.
        mx.synchronize(generation_stream)
        if group is not None:
            mx.eval(mx.distributed.all_sum(mx.array(1.0), group=group))

    for _ in stream_generate(model, tokenizer, task["prompt"], max_tokens=8):
        pass
    meet()
    arrivals: list[float] = []
    tokens: list[int] = []
    began = time.perf_counter()
    for part in stream_generate(model, tokenizer, task["prompt"], max_tokens=task["token_count"]):
        arrivals.append(time.perf_counter())
        tokens.append(part.token)
    meet()
    first, last = arrivals[0], arrivals[-1]
    json.dump(
        {
            "tokens": tokens,
            "first_token_seconds": first - began,
            "decode_tokens_per_second": (len(tokens) - 1) / (last - first),
            "seconds": last - began,
        },
        sys.stdout,
    )


if __name__ == "__main__":
    _main(sys.argv[1])
