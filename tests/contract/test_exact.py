"""Stages over real rings compute to the bit what mlx-lm computes in one process.

A few models, each in a way of its own; `make exact` compares every architecture.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from tests.conformance.exact import RingOf
from tests.conformance.exact_rank import SAME, Task, make_model, run_whole

CONFIGS: dict[str, dict[str, Any]] = {
    config["model_type"]: config
    for config in json.loads(
        (Path(__file__).parents[1] / "vectors" / "architectures.json").read_text()
    )
}


def quantized(name: str, bits: int) -> dict[str, Any]:
    return {**CONFIGS[name], "quantization": {"group_size": 32, "bits": bits}}


# In each ring, models and the layers that ranks begin and end at.
RINGS = {
    3: [
        # The head tied to the embedding, which both end ranks then hold.
        (quantized("ernie4_5", 4), [0, 1, 3, 4]),
        # Windows and full attention; the middle rank has no window, the others no full attention.
        (quantized("exaone4", 8), [0, 2, 3, 4]),
        # State spaces, attention and a mixture of experts.
        (CONFIGS["granitemoehybrid"], [0, 1, 2, 4]),
    ],
    5: [
        (quantized("olmo3", 4), [0, 1, 2, 4, 7, 8]),
        # May be cut before layers 1 to 7 only.
        (CONFIGS["afm7"], [0, 1, 2, 3, 7, 16]),
    ],
}


@pytest.mark.parametrize("size", RINGS)
async def test_stages_are_exact_alone_and_in_lanes(size: int, tmp_path: Path) -> None:
    ring = RingOf(size)
    try:
        for config, bounds in RINGS[size]:
            name = config["model_type"]
            folder, logits = tmp_path / name, str(tmp_path / f"{name}.safetensors")
            whole = str(tmp_path / f"{name}-whole.safetensors")
            made = make_model(config, folder)
            await asyncio.to_thread(run_whole, Task(str(folder), 0, made.layer_count, whole))
            tasks = [Task(str(folder), bounds[i], bounds[i + 1], logits) for i in range(size)]
            answers = await ring.run(tasks)
            assert {"lanes": SAME} in answers, (name, answers)
            assert {"logits": logits} in answers, (name, answers)
            expected, got = mx.load(whole), mx.load(logits)
            assert isinstance(expected, dict)
            assert isinstance(got, dict)
            assert mx.array_equal(expected["logits"], got["logits"]), name
    finally:
        await ring.stop()
