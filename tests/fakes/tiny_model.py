"""Small repositories in the usual layout, written without any library."""

import json
from collections.abc import Mapping
from pathlib import Path

LAYERS = 4
CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": LAYERS,
    "hidden_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}


def safetensors(tensors: Mapping[str, int], dtype: str = "BF16") -> bytes:
    """Return a file that holds tensors of these sizes in bytes, filled with changing bytes."""
    header, position = {}, 0
    for name, size in tensors.items():
        header[name] = {
            "dtype": dtype,
            "shape": [size // 2],
            "data_offsets": [position, position + size],
        }
        position += size
    text = json.dumps(header).encode()
    body = bytes(range(256)) * (position // 256 + 1)
    return len(text).to_bytes(8, "little") + text + body[:position]


def write_model(folder: Path, *, layer_bytes: int = 2000) -> None:
    """Write a model of four layers in three files: embedding and 0, 1 and 2, 3 and the head."""
    folder.mkdir(parents=True)
    files = {
        "model-00001-of-00003.safetensors": {
            "model.embed_tokens.weight": 500,
            "model.layers.0.mlp.weight": layer_bytes,
        },
        "model-00002-of-00003.safetensors": {
            "model.layers.1.mlp.weight": layer_bytes,
            "model.layers.2.mlp.weight": layer_bytes,
        },
        "model-00003-of-00003.safetensors": {
            "model.layers.3.mlp.weight": layer_bytes,
            "model.norm.weight": 16,
            "lm_head.weight": 500,
        },
    }
    for name, tensors in files.items():
        (folder / name).write_bytes(safetensors(tensors))
    index = {tensor: name for name, tensors in files.items() for tensor in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ x }}"}))
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# A model\n")
    (folder / "modeling.py").write_text("raise SystemExit")
    (folder / ".gitattributes").write_text("*.safetensors lfs\n")
