"""Models of random weights in any size, in the usual layout: to be fetched, not to be run."""

import json
import os
from pathlib import Path

FILE_COUNT = 16
_PIECE_BYTES = 2**24


def write_random_model(folder: Path, weight_bytes: int) -> None:
    """Write a model with a layer in each of its files. Blocks."""
    folder.mkdir(parents=True)
    config = {"model_type": "llama", "num_hidden_layers": FILE_COUNT, "hidden_size": 2048}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    names = {}
    for layer in range(FILE_COUNT):
        name = f"model-{layer + 1:05}-of-{FILE_COUNT:05}.safetensors"
        tensor = f"model.layers.{layer}.mlp.weight"
        names[tensor] = name
        _write_file(folder / name, tensor, weight_bytes // FILE_COUNT // 2 * 2)
    index = {"metadata": {"total_size": weight_bytes}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _write_file(path: Path, tensor: str, size: int) -> None:
    entry = {"dtype": "BF16", "shape": [size // 2], "data_offsets": [0, size]}
    header = json.dumps({tensor: entry}).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        left = size
        while left:
            piece = os.urandom(min(left, _PIECE_BYTES))
            file.write(piece)
            left -= len(piece)
