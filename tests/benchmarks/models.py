"""The models that are measured: hub folders made on the spot, in mlx-lm's own layout.

No model ever ends by itself: its end token is one outside the vocabulary, so that both sides of a
comparison make the same number of tokens. Running this module makes the folders in a process of
its own, so that the one that measures never holds MLX:

    python -m tests.benchmarks.models HUB_FOLDER
"""

import json
import shutil
import sys
from pathlib import Path

TINY_FACTS = "shardring/tiny-facts"
LLAMA = "random/llama-38m"
QWEN2 = "random/qwen2-48m"
# The first one with a longer context.
LLAMA_LONG = "random/llama-38m-long"

_SOURCE = Path(__file__).parents[2] / "models" / TINY_FACTS
_VOCABULARY = 1024
_NEVER = _VOCABULARY
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
_RANDOM = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": _NEVER,
}
_CONFIGS: dict[str, dict[str, object]] = {
    LLAMA: {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_key_value_heads": 4,
        **_RANDOM,
    },
    LLAMA_LONG: {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_key_value_heads": 4,
        **_RANDOM,
        "max_position_embeddings": 4096,
    },
    QWEN2: {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        **_RANDOM,
        "num_key_value_heads": 8,
        "num_hidden_layers": 14,
    },
}


def prompt(length: int, turn: int = 0) -> list[int]:
    """Return a prompt of `length` token ids that every model here knows, the same for each `turn`.

    Prompts of different turns begin differently, so that what is kept of one never helps another.
    """
    count = _VOCABULARY - 6
    return [6 + (7919 * position + 101 * turn) % count for position in range(length)]


def write_models(hub: Path) -> None:
    """Write all models into a hub folder."""
    _write_tiny_facts(hub / TINY_FACTS)
    for name, config in _CONFIGS.items():
        _write_random(hub / name, config)


def _write_tiny_facts(folder: Path) -> None:
    shutil.copytree(_SOURCE, folder)
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(settings | {"eos_token_id": _NEVER}))


def _write_random(folder: Path, config: dict[str, object]) -> None:
    """Write a model of random weights, one file a layer and one for the rest."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm import utils

    folder.mkdir(parents=True)
    for name in _TOKENIZER_FILES:
        shutil.copy(_SOURCE / name, folder / name)
    (folder / "config.json").write_text(json.dumps(config))
    mx.random.seed(1)
    model_class, arguments = utils._get_classes(config)
    model = model_class(arguments.from_dict(config))
    files: dict[str, dict[str, mx.array]] = {}
    for name, weight in tree_flatten(model.parameters()):
        words = name.split(".")
        part = words[words.index("layers") + 1] if "layers" in words else "rest"
        files.setdefault(f"model-{part}.safetensors", {})[name] = weight
    for name, weights in files.items():
        mx.save_safetensors(str(folder / name), weights, metadata={"format": "mlx"})
    index = {weight: name for name, weights in files.items() for weight in weights}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


if __name__ == "__main__":
    write_models(Path(sys.argv[1]))
