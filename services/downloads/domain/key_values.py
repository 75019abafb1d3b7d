"""How large a model's key-value cache grows, judged by its config.json alone.

The figures are those of mlx-lm's own caches. A layer that attends only to a window counts like
one that attends to everything: up to the window's length it takes just as much.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from services.downloads.domain.config import HEADS, HIDDEN, KEY_VALUE_HEADS, find, text_config
from services.downloads.domain.layers import MAX_LAYERS

# A million times what real models take: what is more is no model's.
_MAX_BYTES = 2**40
_MAX_FIGURE = 2**31 - 1
_DEFAULT_BYTES_PER_VALUE = 2
_NONE, _FULL, _SLIDING = "none", "full", "sliding"
_HEAD_DIM = ("head_dim", "kv_channels", "hidden_size_per_head")
_GROUPS = (*KEY_VALUE_HEADS, "multi_query_group_num")
# Multi-head latent attention whose keys and values mlx-lm keeps unpacked.
_UNPACKED = frozenset({"deepseek_v2", "minicpm3", "youtu_llm"})
# Two attentions in each layer.
_DOUBLE = frozenset({"longcat_flash", "longcat_flash_ngram"})
# Sparse attention, whose index keeps keys of its own.
_INDEXED = frozenset({"deepseek_v32", "glm_moe_dsa"})
# Attention and a state-space model side by side in each layer.
_PARALLEL = frozenset({"falcon_h1"})
# Some layers of such a model keep a state of one size in place of keys and values.
_RECURRENT = ("mamba_", "ssm_", "linear_num_", "linear_attn", "state_size", "conv_L_", "rwkv")


def key_value_bytes_per_token(
    config: Mapping[str, Any], layer_count: int, bytes_per_value: int
) -> int:
    """Return the bytes that one token of context takes in all layers together.

    `bytes_per_value` 0: unknown, taken to be 2. Returns 0 when config.json does not say enough,
    whatever is wrong with it.
    """
    config = text_config(config)
    if not isinstance(config.get("model_type"), str):
        return 0
    if not 0 < layer_count <= MAX_LAYERS:
        return 0
    if (kinds := _kinds(config, layer_count)) is None:
        return 0
    shared = _figure(config, ("num_kv_shared_layers", "num_kv_reuse_layers"))
    kept = kinds[: max(0, layer_count - shared)]
    widths = [0 if kind == _NONE else _width(config, i, kind) for i, kind in enumerate(kept)]
    if any(width == 0 for width, kind in zip(widths, kept, strict=True) if kind != _NONE):
        return 0
    total = sum(widths) * (bytes_per_value or _DEFAULT_BYTES_PER_VALUE)
    return total if total <= _MAX_BYTES else 0


def _kinds(config: Mapping[str, Any], count: int) -> list[str] | None:
    """Return what each layer attends to; None when it is one of several kinds, but not told."""
    for key in ("layer_types", "layers_block_type", "hybrid_override_pattern"):
        listed = config.get(key)
        if isinstance(listed, list | str) and len(listed) >= count:
            return [_kind(word) for word in listed[:count]]
    if isinstance(blocks := config.get("block_configs"), list) and len(blocks) >= count:
        return [_kind_of_block(block) for block in blocks[:count]]
    if isinstance(pattern := config.get("hybrid_layer_pattern"), list) and len(pattern) >= count:
        return [_SLIDING if entry == 1 else _FULL for entry in pattern[:count]]
    if (full := _full_layers(config, count)) is not None:
        return [_FULL if layer in full else _NONE for layer in range(count)]
    if config.get("model_type") not in _PARALLEL and any(
        key.startswith(_RECURRENT) for key in config
    ):
        return None
    return [_FULL] * count


def _full_layers(config: Mapping[str, Any], count: int) -> set[int] | None:
    """Return the layers that have attention; None when config.json names none of them."""
    layers = set(range(count))
    for key in ("full_attn_idxs", "attn_layer_indices"):
        if isinstance(named := config.get(key), list):
            return layers & {layer for layer in named if type(layer) is int}
    if period := _figure(config, ("attn_layer_period",)):
        offset = _figure(config, ("attn_layer_offset",))
        return {layer for layer in layers if layer % period == offset}
    linear = config.get("linear_attn_config")
    if isinstance(linear, dict) and isinstance(named := linear.get("kda_layers"), list):
        return layers - {layer - 1 for layer in named if type(layer) is int}
    if interval := _figure(config, ("full_attention_interval",)):
        return {layer for layer in layers if (layer + 1) % interval == 0}
    if group := _figure(config, ("layer_group_size",)):
        tail = count // group * group
        return {layer for layer in layers if (layer + 1) % group == 0 or layer >= tail}
    return None


def _kind(word: object) -> str:
    if not isinstance(word, str) or "linear" in word:
        return _NONE
    if "sliding" in word or "chunked" in word:
        return _SLIDING
    return _FULL if word == "*" or "attention" in word else _NONE


def _kind_of_block(block: object) -> str:
    attention = _attention_of(block)
    if not attention or attention.get("no_op") or attention.get("replace_with_linear"):
        return _NONE
    return _FULL


def _attention_of(block: object) -> Mapping[str, Any]:
    attention = block.get("attention") if isinstance(block, dict) else None
    return attention if isinstance(attention, dict) else {}


def _width(config: Mapping[str, Any], layer: int, kind: str) -> int:
    """Return how many numbers a token adds to one layer's keys and values; 0: not told."""
    heads = _figure(config, HEADS)
    if rank := _figure(config, ("kv_lora_rank",)):
        width = _latent_width(config, heads, rank)
        return 2 * width if config.get("model_type") in _DOUBLE else width
    dim = _figure(config, _HEAD_DIM)
    if not dim and heads:
        dim = _figure(config, HIDDEN) // heads
    groups = _groups(config, layer, heads)
    value_dim = _figure(config, ("v_head_dim",)) or dim
    if kind == _SLIDING:
        groups = _figure(config, ("swa_num_key_value_heads",)) or groups
        dim = _figure(config, ("swa_head_dim",)) or dim
        value_dim = _figure(config, ("swa_v_head_dim",)) or value_dim
    elif global_dim := _figure(config, ("global_head_dim",)):
        groups = _figure(config, ("num_global_key_value_heads",)) or groups
        dim = value_dim = global_dim
    return groups * (dim + value_dim) if dim else 0


def _latent_width(config: Mapping[str, Any], heads: int, rank: int) -> int:
    rope = _figure(config, ("qk_rope_head_dim",))
    if config.get("model_type") in _UNPACKED:
        dims = [rope, *(_figure(config, (key,)) for key in ("qk_nope_head_dim", "v_head_dim"))]
        return heads * sum(dims) if all(dims) else 0
    index = _figure(config, ("index_head_dim",))
    if not rope or (not index and config.get("model_type") in _INDEXED):
        return 0
    # The index keeps its keys twice.
    return rank + rope + 2 * index


def _groups(config: Mapping[str, Any], layer: int, heads: int) -> int:
    """Return a layer's key-value heads: as many as there are heads when nothing else is said."""
    blocks = config.get("block_configs")
    if isinstance(blocks, list) and layer < len(blocks):
        return heads // (_figure(_attention_of(blocks[layer]), ("n_heads_in_group",)) or 1)
    stated = find(config, _GROUPS)
    if isinstance(stated, Sequence) and not isinstance(stated, str):
        stated = stated[layer] if layer < len(stated) else None
        return stated if type(stated) is int and 0 < stated <= _MAX_FIGURE else 0
    if stated is None:
        return 1 if config.get("multi_query") is True else heads
    return _figure(config, _GROUPS)


def _figure(config: Mapping[str, Any], keys: tuple[str, ...]) -> int:
    """Return a positive figure, 0 for anything else."""
    value = find(config, keys)
    return value if type(value) is int and 0 < value <= _MAX_FIGURE else 0
