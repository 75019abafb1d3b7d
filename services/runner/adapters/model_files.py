"""What a model's small files say about it, and its tokenizer's files for those who tokenize."""

import hashlib
import io
import json
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.errors import Reason, ShardringError

# The names under which tokenizers are published; never a weight file, never a program.
_NAMES = frozenset(
    {
        "tokenizer.json",
        "tokenizer_config.json",
        "tokenizer.model",
        "tiktoken.model",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "vocab.txt",
        "merges.txt",
        "chat_template.json",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
    }
)
_SUFFIXES = (".tiktoken", ".jinja")
# A file's time of 0 in a zip. The same files make the same bytes, on every node.
_EPOCH = (1980, 1, 1, 0, 0, 0)
_CONTEXT_KEYS = ("max_position_embeddings", "max_seq_len", "n_positions", "seq_length", "n_ctx")


@dataclass(frozen=True)
class TokenizerFiles:
    """A zip of a tokenizer's files, and its SHA-256 in hexadecimal."""

    data: bytes
    sha256: str


@dataclass(frozen=True)
class ModelFacts:
    """What config.json says, and generation_config.json of end tokens. 0: not said."""

    model_type: str = ""
    architectures: tuple[str, ...] = ()
    context_token_count: int = 0
    vocabulary_size: int = 0
    end_token_ids: tuple[int, ...] = ()
    start_token_id: int = 0
    padding_token_id: int = 0


def tokenizer_files(folder: Path) -> TokenizerFiles:
    """Zip the tokenizer's files of the model in a folder. Reads the disk: call it in a thread.

    Raises ShardringError(MODEL_MALFORMED) when there are none.
    """
    found = sorted(
        path for path in folder.iterdir() if _is_tokenizer_file(path.name) and path.is_file()
    )
    if not any(path.name.startswith(("tokenizer", "tiktoken", "vocab")) for path in found):
        raise ShardringError(
            Reason.MODEL_MALFORMED, f"There are no tokenizer files in {folder.name}."
        )
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in found:
            entry = zipfile.ZipInfo(path.name, _EPOCH)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, path.read_bytes())
    data = buffer.getvalue()
    return TokenizerFiles(data, hashlib.sha256(data).hexdigest())


def model_facts(folder: Path) -> ModelFacts:
    """Read what a model says about itself. Reads the disk: call it in a thread.

    Raises ShardringError(MODEL_MALFORMED) when config.json cannot be read.
    """
    config = _read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    preset = _read_json(generation) if generation.is_file() else {}
    inner = config.get("text_config")
    text = {**config, **inner} if isinstance(inner, dict) else config
    end = preset.get("eos_token_id") or text.get("eos_token_id")
    return ModelFacts(
        model_type=str(config.get("model_type") or ""),
        architectures=tuple(str(name) for name in config.get("architectures") or ()),
        context_token_count=_first_count(text.get(key) for key in _CONTEXT_KEYS),
        vocabulary_size=_first_count([text.get("vocab_size")]),
        end_token_ids=_token_ids(end),
        start_token_id=next(iter(_token_ids(text.get("bos_token_id"))), 0),
        padding_token_id=next(iter(_token_ids(text.get("pad_token_id"))), 0),
    )


def _is_tokenizer_file(name: str) -> bool:
    return name in _NAMES or name.endswith(_SUFFIXES)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ShardringError(
            Reason.MODEL_MALFORMED, f"{path.name} cannot be read: {error}"
        ) from error
    if not isinstance(found, dict):
        raise ShardringError(Reason.MODEL_MALFORMED, f"{path.name} is no JSON object.")
    return found


def _first_count(values: Iterable[Any]) -> int:
    return next((value for value in values if isinstance(value, int) and 0 < value < 2**32), 0)


def _token_ids(value: Any) -> tuple[int, ...]:
    given = value if isinstance(value, list) else [value]
    return tuple(i for i in given if isinstance(i, int) and 0 <= i < 2**32)
