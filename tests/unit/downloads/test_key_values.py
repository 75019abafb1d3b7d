"""A key-value cache's size as config.json tells it, against the engine's own caches."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import CacheList, make_prompt_cache
from mlx_lm.utils import _get_classes

from services.downloads.domain.key_values import key_value_bytes_per_token

VECTORS = Path(__file__).parents[2] / "vectors" / "architectures.json"
CONFIGS: dict[str, dict[str, Any]] = {
    config["model_type"]: config for config in json.loads(VECTORS.read_text())
}
# These leave to the architecture's own defaults what decides.
SILENT = {
    "nanochat",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
    "deepseek_v32",
    "youtu_llm",
}
# No keys and values are kept.
RECURRENT = {"mamba2", "rwkv7"}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}


def cache_bytes(cache: Any) -> int:
    """Return what a cache's keys and values take, without what it has set aside for later."""
    if isinstance(cache, list | CacheList):
        return sum(map(cache_bytes, cache if isinstance(cache, list) else cache.caches))
    if not isinstance(getattr(cache, "keys", None), mx.array):
        return 0
    length = min(cache.offset, cache.keys.shape[2])
    return sum(
        array.shape[0] * array.shape[1] * length * array.shape[3] * array.itemsize
        for array in (cache.keys, cache.values)
    )


def measured(config: dict[str, Any]) -> float:
    """Return by how much the engine's caches grow for a token, in 32-bit numbers."""
    model_class, arguments = _get_classes(config)
    model = model_class(arguments.from_dict(config))
    sizes = []
    for length in (3, 7):
        cache = make_prompt_cache(model)
        mx.eval(model(mx.array([list(range(1, length + 1))]), cache=cache))
        sizes.append(cache_bytes(cache))
    return (sizes[1] - sizes[0]) / 4


@pytest.mark.parametrize(
    "name",
    [
        "afm7",  # keys and values shared by the last layers
        "gemma4",  # the same, and wider where attention is global
        "glm4_moe_lite",  # latent attention
        "kimi_linear",  # the same in some layers
        "longcat_flash",  # twice in each layer
        "nemotron-nas",  # another number of heads in each layer
        "nemotron_h",  # a pattern of letters
        "granitemoehybrid",  # a list of kinds
        "bailing_moe_linear",  # the last of each group
        "mimo_v2_flash",  # values narrower than keys
        "lfm2-vl",
        "telechat3",
    ],
)
def test_it_is_what_the_engine_s_caches_take(name: str) -> None:
    config = CONFIGS[name]
    assert key_value_bytes_per_token(config, config["num_hidden_layers"], 4) == measured(config)


@pytest.mark.parametrize(
    ("model_type", "more"),
    [
        ("qwen3_next", {"full_attention_interval": 4}),
        ("deepseek_v32", {"index_head_dim": 128}),
    ],
)
def test_what_is_silent_counts_nothing_until_it_speaks(
    model_type: str, more: dict[str, int]
) -> None:
    config = CONFIGS[model_type]
    count = config["num_hidden_layers"]
    assert key_value_bytes_per_token(config, count, 4) == 0
    assert key_value_bytes_per_token({**config, **more}, count, 4) == measured({**config, **more})


def test_every_other_configuration_says_enough() -> None:
    silent = {
        name
        for name, config in CONFIGS.items()
        if not key_value_bytes_per_token(config, config["num_hidden_layers"], 2)
    }
    assert silent == SILENT | RECURRENT


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, 3 * 2 * (8 + 8) * 2),
        ({"head_dim": 16}, 3 * 2 * (16 + 16) * 2),
        ({"num_key_value_heads": None}, 3 * 8 * (8 + 8) * 2),
        ({"num_key_value_heads": None, "multi_query": True}, 3 * 1 * (8 + 8) * 2),
        ({"num_key_value_heads": [1, 2, 4]}, 7 * (8 + 8) * 2),
        ({"layer_types": ["full_attention", "linear_attention", "sliding_attention"]}, 2 * 64),
        ({"layer_types": ["full_attention"]}, 3 * 64),
        ({"attn_layer_indices": [1, 7, "x"]}, 64),
        ({"full_attention_interval": 3}, 64),
        ({"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 16}, 64),
        ({"text_config": {"num_key_value_heads": 1}}, 3 * 32),
        ({"mamba_d_state": 16}, 0),
        ({"mamba_d_state": 16, "model_type": "falcon_h1"}, 3 * 64),
    ],
)
def test_rules(more: dict[str, Any], expected: int) -> None:
    assert key_value_bytes_per_token({**LLAMA, **more}, 3, 0) == expected


@pytest.mark.parametrize("value", [-1, 0, 10**30, 1.5, True, "8", [], {}, [[]], [None, -3, 10**30]])
@pytest.mark.parametrize(
    "key",
    [
        "num_attention_heads",
        "num_key_value_heads",
        "hidden_size",
        "head_dim",
        "kv_lora_rank",
        "layer_types",
        "block_configs",
        "hybrid_layer_pattern",
        "hybrid_override_pattern",
        "full_attn_idxs",
        "full_attention_interval",
        "attn_layer_period",
        "layer_group_size",
        "linear_attn_config",
        "num_kv_shared_layers",
        "text_config",
        "model_type",
    ],
)
def test_whatever_stands_there_the_figure_fits_its_field(key: str, value: object) -> None:
    for more in ({key: value}, {key: [value] * 3}, {"text_config": {key: value}}):
        assert 0 <= key_value_bytes_per_token({**LLAMA, **more}, 3, 4) < 2**41
    assert key_value_bytes_per_token(LLAMA, 10**9, 4) == 0
    huge = {**LLAMA, "num_key_value_heads": 2**31 - 1, "head_dim": 2**31 - 1}
    assert key_value_bytes_per_token(huge, 10_000, 4) == 0
