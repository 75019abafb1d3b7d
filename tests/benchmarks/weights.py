"""Models of random weights in any size, in the usual layout: to be fetched or loaded, not run."""

import json
import os
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path

FILE_COUNT = 16
_PIECE_BYTES = 2**24

LAYER_COUNT = 22
_LLAMA_FILE_COUNT = 4
_WIDTH, _INNER, _KEY_VALUE, _VOCABULARY = 2048, 5632, 512, 1024
_LLAMA_LAYER: dict[str, tuple[int, ...]] = {
    "input_layernorm.weight": (_WIDTH,),
    "mlp.down_proj.weight": (_WIDTH, _INNER),
    "mlp.gate_proj.weight": (_INNER, _WIDTH),
    "mlp.up_proj.weight": (_INNER, _WIDTH),
    "post_attention_layernorm.weight": (_WIDTH,),
    "self_attn.k_proj.weight": (_KEY_VALUE, _WIDTH),
    "self_attn.o_proj.weight": (_WIDTH, _WIDTH),
    "self_attn.q_proj.weight": (_WIDTH, _WIDTH),
    "self_attn.v_proj.weight": (_KEY_VALUE, _WIDTH),
}
# In bfloat16.
LAYER_BYTES = 2 * sum(prod(shape) for shape in _LLAMA_LAYER.values())
_LLAMA_CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": LAYER_COUNT,
    "hidden_size": _WIDTH,
    "intermediate_size": _INNER,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": _VOCABULARY,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}

_Tensors = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Extent:
    """Bytes [start, end) of a file."""

    path: Path
    start: int
    end: int


def write_random_model(folder: Path, weight_bytes: int) -> None:
    """Write a model with a layer in each of its files. Blocks."""
    config: dict[str, object] = {
        "model_type": "llama",
        "num_hidden_layers": FILE_COUNT,
        "hidden_size": 2048,
    }
    count = weight_bytes // FILE_COUNT // 2
    files: list[_Tensors] = [
        {f"model.layers.{layer}.mlp.weight": (count,)} for layer in range(FILE_COUNT)
    ]
    _write(folder, config, files)
    (folder / "tokenizer.json").write_text("{}")


def write_random_llama(folder: Path) -> None:
    """Write a Llama of 2 GB that mlx-lm can load, in a few files with several layers each. Blocks.

    There is no tokenizer.
    """
    tensors: _Tensors = {"model.embed_tokens.weight": (_VOCABULARY, _WIDTH)}
    for layer in range(LAYER_COUNT):
        tensors |= {f"model.layers.{layer}.{name}": s for name, s in _LLAMA_LAYER.items()}
    tensors["model.norm.weight"] = (_WIDTH,)
    names = list(tensors)
    cuts = [len(names) * part // _LLAMA_FILE_COUNT for part in range(_LLAMA_FILE_COUNT + 1)]
    files = [{name: tensors[name] for name in names[a:b]} for a, b in pairwise(cuts)]
    _write(folder, _LLAMA_CONFIG, files)


def layer_extents(folder: Path, start: int, end: int) -> list[Extent]:
    """Return where the weights of layers [start, end) are, neighbouring ones together."""
    wanted = tuple(f"model.layers.{layer}." for layer in range(start, end))
    extents: list[Extent] = []
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
        for name, entry in header.items():
            if not name.startswith(wanted):
                continue
            a, b = (8 + size + offset for offset in entry["data_offsets"])
            if extents and extents[-1].path == path and extents[-1].end == a:
                a = extents.pop().start
            extents.append(Extent(path, a, b))
    return extents


def _write(folder: Path, config: dict[str, object], files: list[_Tensors]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    names = {}
    for number, tensors in enumerate(files, 1):
        name = f"model-{number:05}-of-{len(files):05}.safetensors"
        names.update(dict.fromkeys(tensors, name))
        _write_file(folder / name, tensors)
    total = sum(2 * prod(shape) for tensors in files for shape in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _write_file(path: Path, tensors: _Tensors) -> None:
    """Write tensors of random bfloat16 numbers, and have them on the disk."""
    header, at = {}, 0
    for tensor, shape in tensors.items():
        size = 2 * prod(shape)
        header[tensor] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        while at:
            piece = os.urandom(min(at, _PIECE_BYTES))
            file.write(piece)
            at -= len(piece)
        file.flush()
        os.fsync(file.fileno())
