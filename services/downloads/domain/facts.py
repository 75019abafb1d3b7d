"""A model's facts from the text of its own files."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.downloads.domain.config import HEADS, HIDDEN, KEY_VALUE_HEADS, find
from services.downloads.domain.header import Header, Malformed
from services.downloads.domain.key_values import key_value_bytes_per_token
from services.downloads.domain.layers import (
    MAX_LAYERS,
    Part,
    further_layers,
    head_is_tied,
    layer_prefix,
    part_of,
)
from services.downloads.domain.records import ModelFacts, ModelFile

# Longest name that a configuration may give something.
_MAX_WORD = 100
_LAYER_COUNT = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_CONTEXT = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")
_FLOAT_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8}
_CONFIG_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class ModelText:
    """What was read of a model: all that facts are made of.

    `sizes` holds the bytes of every needed file by name; `headers` those of its weight files.
    """

    model_id: str
    commit: str
    config: Mapping[str, Any]
    headers: Mapping[str, Header]
    sizes: Mapping[str, int]
    has_chat_template: bool
    license: str
    engine_supported: bool
    tensor_supported: bool = False


def model_facts(text: ModelText) -> ModelFacts:
    """Work out what the files say; `gated` only the hub knows.

    Raises Malformed when they contradict each other.
    """
    config = text.config
    if not isinstance(model_type := config.get("model_type"), str) or not model_type:
        raise Malformed("it has no model_type")
    if len(model_type) > _MAX_WORD or not model_type.isprintable():
        raise Malformed(f"its model_type is {model_type[:40]!r}")
    tensor_bytes = {
        name: tensor.size_bytes
        for header in text.headers.values()
        for name, tensor in header.tensors.items()
    }
    prefix, layer_count = layer_prefix(tensor_bytes, _count(config, _LAYER_COUNT) or None)
    says_tied = find(config, ("tie_word_embeddings",)) is True
    tied = head_is_tied(tensor_bytes, prefix, says_tied)
    further = further_layers(tensor_bytes, prefix, layer_count)
    parts = {name: part_of(name, prefix, layer_count, tied, further) for name in tensor_bytes}
    layer_bytes = [0] * layer_count
    for name, part in parts.items():
        if part.layer is not None:
            layer_bytes[part.layer] += tensor_bytes[name]
    hidden_bytes = _hidden_bytes(text)
    return ModelFacts(
        model_id=text.model_id,
        commit=text.commit,
        model_type=model_type,
        engine_supported=text.engine_supported,
        layer_bytes=tuple(layer_bytes),
        embedding_bytes=sum(tensor_bytes[name] for name, part in parts.items() if part.first),
        head_bytes=sum(tensor_bytes[name] for name, part in parts.items() if part.last),
        weight_bytes=sum(tensor_bytes.values()),
        hidden_size=_count(config, HIDDEN),
        attention_head_count=_count(config, HEADS),
        key_value_head_count=_count(config, KEY_VALUE_HEADS),
        context_token_count=_count(config, _CONTEXT),
        has_chat_template=text.has_chat_template,
        quantization=_quantization(config),
        license=text.license,
        hidden_bytes_per_value=hidden_bytes,
        files=_files(text, parts),
        key_value_bytes_per_token=key_value_bytes_per_token(config, layer_count, hidden_bytes),
        tensor_supported=text.tensor_supported,
    )


def _files(text: ModelText, parts: Mapping[str, Part]) -> tuple[ModelFile, ...]:
    files = []
    for name, size in sorted(text.sizes.items()):
        if (header := text.headers.get(name)) is None:
            files.append(ModelFile(name, size, every_stage=True))
            continue
        held = [parts[tensor] for tensor in header.tensors]
        files.append(
            ModelFile(
                name,
                size,
                first_stage=any(part.first for part in held),
                last_stage=any(part.last for part in held),
                layers=tuple(sorted({part.layer for part in held if part.layer is not None})),
            )
        )
    return tuple(files)


def _count(config: Mapping[str, Any], keys: tuple[str, ...]) -> int:
    """Return a positive count, 0 when config.json does not say. Raises Malformed."""
    value = find(config, keys)
    if value is None:
        return 0
    limit = MAX_LAYERS if keys is _LAYER_COUNT else 2**31 - 1
    if type(value) is not int or not 1 <= value <= limit:
        # Some families give one head count for each layer: not one figure, but no fault either.
        if isinstance(value, list) and keys is not _LAYER_COUNT:
            return 0
        raise Malformed(f"its {keys[0]} is {str(value)[:40]}")
    return value


def _quantization(config: Mapping[str, Any]) -> str:
    """Return such as "4-bit, group size 64"; empty for unquantised weights."""
    for key in ("quantization", "quantization_config"):
        how = config.get(key)
        if not isinstance(how, dict):
            continue
        words = []
        if type(bits := how.get("bits")) is int:
            words.append(f"{bits}-bit")
        elif isinstance(method := how.get("quant_method"), str) and method.isprintable():
            words.append(method[:_MAX_WORD])
        if type(group := how.get("group_size")) is int and group > 0:
            words.append(f"group size {group}")
        if words:
            return ", ".join(words)
    return ""


def _hidden_bytes(text: ModelText) -> int:
    """Return the width of one hidden-state number: that of most floating tensors.

    A quantised model's scales and norms are kept in the type it computes in.
    """
    kinds = Counter(
        tensor.dtype
        for header in text.headers.values()
        for tensor in header.tensors.values()
        if tensor.dtype in _FLOAT_BYTES
    )
    if kinds:
        return _FLOAT_BYTES[kinds.most_common(1)[0][0]]
    return _CONFIG_BYTES.get(str(find(text.config, ("torch_dtype", "dtype"))), 0)
