"""Small tokenizers of all kinds, made on the spot and loaded as a model's own."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Made

from services.runner.engine.text import Tokenizer

END = "<|end|>"
CALL = "<|call|>"
_CONFIG = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}


def byte_level(folder: Path) -> Tokenizer:
    """Return one whose tokens are single bytes, two merged words, and added tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["ab", "abc", "Ġa"]
    vocabulary = {token: index for index, token in enumerate(alphabet + words)}
    made = Made(models.BPE(vocabulary, [("a", "b"), ("ab", "c"), ("Ġ", "a")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    # Shown as it is: it isn't special; with letters that stand for bytes in byte-level names.
    made.add_tokens([AddedToken("<think é>", special=False)])
    return _saved(made, folder)


def byte_fallback(folder: Path) -> Tokenizer:
    """Return one as SentencePiece makes them: pieces with U+2581 for spaces, and bytes."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁a", "a", "b", "ab", "▁▁", "€"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    made = Made(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return _saved(made, folder)


def words(folder: Path) -> Tokenizer:
    """Return one of another kind: words, split where letters and others meet."""
    pieces = ["[UNK]", "one", "two", "##s", "##é", ",", "."]
    made = Made(models.WordPiece({p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"\W"), "isolated")
    made.decoder = decoders.WordPiece(cleanup=False)
    return _saved(made, folder)


def _saved(made: Any, folder: Path) -> Tokenizer:
    made.add_special_tokens([AddedToken(END, special=True), AddedToken(CALL, special=True)])
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(_CONFIG))
    end = made.token_to_id(END)
    # More ids than tokens, as models have whose vocabulary is padded.
    config = {"vocab_size": made.get_vocab_size() + 8, "eos_token_id": end}
    (folder / "config.json").write_text(json.dumps(config))
    return Tokenizer(folder)
