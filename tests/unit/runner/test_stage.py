"""Stages compute to the bit what the whole model computes, or refuse.

Here in one process on random weights; over a real ring in tests/contract. All architectures of
tests/vectors/architectures.json that differ in how they are cut are among these.
"""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import _get_classes

from services.runner.engine.stage import Stage, StagesUnsupported

CONFIGS: dict[str, dict[str, Any]] = {
    config["model_type"]: config
    for config in json.loads(
        (Path(__file__).parents[2] / "vectors" / "architectures.json").read_text()
    )
}
PROMPT = mx.array([[5, 9, 2, 7, 11, 3, 8]])
STEPS = 6


def build(name: str) -> nn.Module:
    mx.random.seed(0)
    model_class, arguments = _get_classes(CONFIGS[name])
    model = model_class(arguments.from_dict(CONFIGS[name]))
    model.eval()
    mx.eval(model.parameters())
    return model


def whole(name: str) -> list[mx.array]:
    model = build(name)
    cache = make_prompt_cache(model)
    logits = [model(PROMPT, cache=cache)]
    for _ in range(STEPS):
        logits.append(model(mx.argmax(logits[-1][:, -1:], axis=-1), cache=cache))
    mx.eval(logits)
    return logits


def staged(name: str, stage_count: int) -> list[mx.array]:
    layers = len(build(name).layers)
    cuts = [round(i * layers / stage_count) for i in range(stage_count + 1)]
    stages = [Stage(build(name), cuts[i], cuts[i + 1]) for i in range(stage_count)]
    caches = [stage.make_cache() for stage in stages]

    def run(passed: mx.array) -> mx.array:
        for stage, cache in zip(stages, caches, strict=True):
            passed = stage(passed, cache)
            mx.eval(passed)
        return passed

    logits = [run(PROMPT)]
    for _ in range(STEPS):
        logits.append(run(mx.argmax(logits[-1][:, -1:], axis=-1)))
    return logits


@pytest.mark.parametrize("stage_count", [2, 3])
@pytest.mark.parametrize(
    "name",
    [
        "helium",  # the plain case
        "exaone4",  # sliding windows beside full attention
        "deepseek_v32",  # mixture of experts, latent attention
        "llama4",  # chunked attention
        "mamba2",  # state space
        "nemotron_h",  # state space, attention and plain layers mixed
        "qwen3_next",  # linear attention beside full attention
    ],
)
def test_stages_equal_the_whole_to_the_bit(name: str, stage_count: int) -> None:
    for expected, got in zip(whole(name), staged(name, stage_count), strict=True):
        assert mx.array_equal(expected, got)


@pytest.mark.parametrize("name", ["gemma3n", "gemma4", "rwkv7", "afm7", "longcat_flash_ngram"])
def test_what_carries_more_than_a_hidden_state_is_refused(name: str) -> None:
    with pytest.raises(StagesUnsupported):
        staged(name, 2)


@pytest.mark.parametrize(("start", "end"), [(-1, 2), (2, 2), (0, 10_000)])
def test_an_impossible_range_is_an_error(start: int, end: int) -> None:
    with pytest.raises(ValueError, match="layers"):
        Stage(build("helium"), start, end)
