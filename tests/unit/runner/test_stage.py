"""Stages compute to the bit what the whole model computes, or refuse.

Here in one process on random weights; over a real ring in tests/contract. All architectures of
tests/vectors/architectures.json that differ in how they are cut are among these.
"""

import copy
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.generate import _merge_caches
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import _get_classes

from services.runner.engine.stage import Stage, StagesUnsupported, allowed_cuts

CONFIGS: dict[str, dict[str, Any]] = {
    config["model_type"]: config
    for config in json.loads(
        (Path(__file__).parents[2] / "vectors" / "architectures.json").read_text()
    )
}
# One that is large for what it shows.
CONFIGS["bailing_moe_linear"] |= {
    "hidden_size": 128,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "vocab_size": 1000,
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


class Chain:
    """All stages of a model, one after the other."""

    def __init__(self, name: str, *bounds: int) -> None:
        self.stages = [Stage(build(name), *ends) for ends in pairwise(bounds)]

    def make_caches(self) -> list[list[Any]]:
        return [stage.make_cache() for stage in self.stages]

    def __call__(self, passed: mx.array, caches: list[list[Any]]) -> mx.array:
        for stage, cache in zip(self.stages, caches, strict=True):
            passed = stage(passed, cache)
            mx.eval(passed)
        return passed

    def tokens(self, last: mx.array, caches: list[list[Any]], steps: int) -> mx.array:
        """Return greedy tokens [B, steps] after the tokens [B, 1]."""
        chosen = [last]
        for _ in range(steps):
            chosen.append(mx.argmax(self(chosen[-1], caches)[:, -1:], axis=-1))
        return mx.concatenate(chosen[1:], axis=1)


def staged(name: str, *bounds: int) -> list[mx.array]:
    chain = Chain(name, *bounds)
    caches = chain.make_caches()
    logits = [chain(PROMPT, caches)]
    for _ in range(STEPS):
        logits.append(chain(mx.argmax(logits[-1][:, -1:], axis=-1), caches))
    return logits


@pytest.mark.parametrize(
    ("name", "bounds"),
    [
        ("helium", (0, 2, 4)),  # the plain case
        ("exaone4", (0, 2, 3, 4)),  # sliding windows beside full attention
        ("deepseek_v32", (0, 1, 3, 4)),  # mixture of experts, latent attention
        ("llama4", (0, 1, 2, 3, 4)),  # chunked attention
        ("mamba2", (0, 2, 4)),  # state space
        ("nemotron_h", (0, 1, 2, 3, 4)),  # state space, attention and plain layers mixed
        ("qwen3_next", (0, 1, 3, 4)),  # linear attention beside full attention
        ("bailing_moe_linear", (0, 1, 2, 4)),  # whose offset is read from an attention's cache
        ("longcat_flash_ngram", (0, 1, 4)),  # a cache more than layers, for the embedding
        ("afm7", (0, 1, 7, 16)),  # layers that share keys and values
    ],
)
def test_stages_equal_the_whole_to_the_bit(name: str, bounds: tuple[int, ...]) -> None:
    for expected, got in zip(whole(name), staged(name, *bounds), strict=True):
        assert mx.array_equal(expected, got)


@pytest.mark.parametrize(
    ("name", "bounds"),
    [
        ("exaone4", (0, 2, 3, 4)),
        ("bailing_moe_linear", (0, 1, 4)),
        ("granitemoehybrid", (0, 1, 2, 4)),
        ("afm7", (0, 3, 16)),
    ],
)
def test_sequences_merged_and_parted_get_what_each_gets_alone(
    name: str, bounds: tuple[int, ...]
) -> None:
    chain = Chain(name, *bounds)
    assert all(stage.can_batch for stage in chain.stages)
    prompts = [mx.array([[5, 9, 2, 7, 11, 3, 8, 4, 1, 6, 2]]), mx.array([[3, 1, 4]])]
    alone, each = [], []
    for prompt in prompts:
        caches = chain.make_caches()
        chain(prompt[:, :-1], caches)
        each.append(copy.deepcopy(caches))
        alone.append(chain.tokens(prompt[:, -1:], caches, 2 * STEPS))
    merged = [_merge_caches(list(caches)) for caches in zip(*each, strict=True)]
    last = mx.concatenate([prompt[:, -1:] for prompt in prompts])
    both = chain.tokens(last, merged, STEPS)
    assert mx.array_equal(both, mx.concatenate(alone)[:, :STEPS])
    # The first leaves; the other goes on, in a batch of one, then by itself.
    for cache in merged:
        for entry in cache:
            entry.filter(mx.array([1]))
    more = chain.tokens(both[1:, -1:], merged, 2)
    parted = [[entry.extract(0) for entry in cache] for cache in merged]
    rest = chain.tokens(more[:, -1:], parted, STEPS - 2)
    assert mx.array_equal(mx.concatenate([more, rest], axis=1), alone[1][:, STEPS:])


@pytest.mark.parametrize(
    ("name", "bounds", "why"),
    [
        ("gemma3n", (0, 2), "nowhere: later layers are given values made from the tokens"),
        ("gemma4", (5, 10), "nowhere: later layers are given values made from the tokens"),
        ("rwkv7", (0, 1), "nowhere: later layers use more of earlier ones"),
        ("afm7", (0, 8), "only before layers 1-7, not 8: later layers use more of earlier ones"),
        ("afm7", (3, 12), "not 12"),
    ],
)
def test_a_cut_that_more_than_a_hidden_state_would_cross_is_refused(
    name: str, bounds: tuple[int, int], why: str
) -> None:
    with pytest.raises(StagesUnsupported, match=why):
        Stage(build(name), *bounds)


def test_looking_for_cuts_leaves_the_model_as_it_was() -> None:
    model = build("exaone4")
    before = dict(tree_flatten(model.parameters()))
    kinds = [type(layer) for layer in model.layers]
    assert allowed_cuts(model) == ([1, 2, 3], "")
    assert [type(layer) for layer in model.layers] == kinds
    after = dict(tree_flatten(model.parameters()))
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)
    expected = whole("exaone4")[0]
    assert mx.array_equal(model(PROMPT, cache=make_prompt_cache(model)), expected)


class Uneven(nn.Module):  # type: ignore[misc]
    """A model of plain layers; `how` says what else goes from layer to layer."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.embedding = nn.Embedding(11, 8)
        self.layers = [nn.Linear(8, 8) for _ in range(4)]

    def make_cache(self) -> list[Any]:
        return []

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        hidden = self.embedding(tokens)
        first = kept = hidden
        for index, layer in enumerate(self.layers):
            if self.how == "backwards" and index == 2:
                layer = self.layers[1]
            hidden = layer(x=hidden) if self.how == "by name" else layer(hidden)
            if index == 1:
                kept = hidden
            if self.how == "added after" and index == 1:
                hidden = hidden + 1
            if self.how == "skipped to the last" and index == 3:
                hidden = hidden + kept
            if self.how == "the embedding again" and index == 2:
                hidden = hidden + first
            if self.how == "another layer's weights" and index == 3:
                hidden = hidden @ self.layers[1].weight
        logits: mx.array = hidden @ self.embedding.weight.T
        return logits


@pytest.mark.parametrize(
    ("how", "cuts"),
    [
        ("plain", [1, 2, 3]),
        ("added after", [1, 2, 3]),
        ("skipped to the last", [1]),
        ("the embedding again", [3]),
        ("another layer's weights", [1]),
        ("backwards", []),
        ("by name", []),
    ],
)
def test_what_crosses_a_cut_is_seen_in_any_model(how: str, cuts: list[int]) -> None:
    mx.random.seed(0)
    model = Uneven(how)
    tokens = mx.array([[1, 2, 3]])
    expected = model(tokens, [])
    # Any model runs on one node.
    assert mx.array_equal(Stage(model, 0, 4)(tokens, []), expected)
    assert allowed_cuts(model)[0] == cuts
    for cut in cuts:
        mx.random.seed(0)
        first = Stage(Uneven(how), 0, cut)
        mx.random.seed(0)
        last = Stage(Uneven(how), cut, 4)
        assert mx.array_equal(last(first(tokens, []), []), expected)


@pytest.mark.parametrize(("start", "end"), [(-1, 2), (2, 2), (0, 10_000)])
def test_an_impossible_range_is_an_error(start: int, end: int) -> None:
    with pytest.raises(ValueError, match="layers"):
        Stage(build("helium"), start, end)
