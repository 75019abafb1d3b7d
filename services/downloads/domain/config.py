"""Looking things up in a model's config.json, whichever family's words it uses."""

from collections.abc import Mapping
from typing import Any

# Where a model of several modalities keeps the configuration of its text model.
INNER = ("text_config", "llm_config", "language_config")
HIDDEN = ("hidden_size", "n_embd", "d_model", "hidden_dim", "dim", "model_dim")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "n_kv_heads")


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json with what the text model inside it says in front."""
    inner = [value for key in INNER if isinstance(value := config.get(key), dict)]
    merged = dict(config)
    for place in reversed(inner):
        merged |= {key: value for key, value in place.items() if value is not None}
    return merged


def find(config: Mapping[str, Any], keys: tuple[str, ...]) -> Any:
    """Return the first of `keys` that config.json or the text model inside it gives."""
    inner = [value for key in INNER if isinstance(value := config.get(key), dict)]
    for place in (*inner, config):
        for key in keys:
            if place.get(key) is not None:
                return place[key]
    return None
