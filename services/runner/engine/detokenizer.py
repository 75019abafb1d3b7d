"""From a stream of tokens to text, exactly as the tokenizer decodes them all at once.

mlx-lm tells the tokenizer's kind; its own streaming detokenizers are not used, as they show special
tokens, drop a first space that is the model's, and raise for ids that stand for nothing. Nothing
here is cleaned up, and no token id raises.
"""

import codecs
from collections.abc import Callable
from functools import cached_property
from typing import Any, Protocol

from mlx_lm.tokenizer_utils import (
    BPEStreamingDetokenizer,
    SPMStreamingDetokenizer,
    TokenizerWrapper,
    _byte_decoder,
)

# No character is spelled by more tokens; what is not one by then, never will be.
_HELD_TOKENS = 8
_REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """The text of one answer. Special tokens have none."""

    def add(self, token_id: int) -> str:
        """Take a token; return the text that is certain by now and was not returned before."""
        ...

    def finish(self) -> str:
        """Return what was held back; half a character as U+FFFD."""
        ...


class Detokenizers:
    """What the tokens of a model stand for, and a new Detokenizer for each answer."""

    def __init__(self, tokenizer: TokenizerWrapper) -> None:
        self._tokenizer: Any = tokenizer
        self._kind = tokenizer.detokenizer
        # Not every kind says; only transformers' own answer for ids they don't have.
        self._is_fast = getattr(tokenizer, "is_fast", False)
        self._size = len(tokenizer)
        added: dict[int, Any] = tokenizer.added_tokens_decoder
        self.special_ids = {i for i, token in added.items() if token.special}
        self.special_ids |= set(tokenizer.all_special_ids)
        self._bytes = _Bytes(self._read)

    def new(self) -> Detokenizer:
        """Return one that shares no state with any other."""
        if isinstance(self._kind, BPEStreamingDetokenizer):
            return _BytesDetokenizer(self._bytes, trim_space=False)
        if isinstance(self._kind, SPMStreamingDetokenizer):
            return _BytesDetokenizer(self._bytes, trim_space=self._kind.trim_space)
        return _WindowDetokenizer(self._decode, self._has_text)

    def text_of(self, token_id: int) -> str:
        """Return one token's text, alone: special tokens by their name, half characters as
        U+FFFD, ids that stand for nothing as no text."""
        if token_id in self.special_ids:
            return self._name(token_id) or ""
        if self._is_bytes:
            return self._bytes[token_id].decode("utf-8", "replace")
        return self._decode([token_id]) if self._has_text(token_id) else ""

    @cached_property
    def special_names(self) -> dict[str, int]:
        """The special tokens by name."""
        return {name: i for i in self.special_ids if (name := self._name(i)) is not None}

    @property
    def _is_bytes(self) -> bool:
        return isinstance(self._kind, BPEStreamingDetokenizer | SPMStreamingDetokenizer)

    def _name(self, token_id: int) -> str | None:
        """Return a token as its vocabulary writes it; None for an id that stands for nothing."""
        if token_id < 0 or (not self._is_fast and token_id >= self._size):
            return None
        name: str | None = self._tokenizer.convert_ids_to_tokens(token_id)
        return name

    def _has_text(self, token_id: int) -> bool:
        return token_id not in self.special_ids and self._name(token_id) is not None

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        return text

    def _read(self, token_id: int) -> bytes:
        name = self._name(token_id)
        if name is None or token_id in self.special_ids:
            return b""
        if isinstance(self._kind, BPEStreamingDetokenizer):
            return _byte_level(name)
        if len(name) == len("<0x00>") and name.startswith("<0x") and name.endswith(">"):
            return bytes.fromhex(name[3:5])
        return name.replace("\u2581", " ").encode()


class _Bytes(dict[int, bytes]):
    """Bytes by token id, each read when it first comes."""

    def __init__(self, read: Callable[[int], bytes]) -> None:
        super().__init__()
        self._read = read

    def __missing__(self, token_id: int) -> bytes:
        self[token_id] = found = self._read(token_id)
        return found


class _BytesDetokenizer:
    """For tokens that are bytes of UTF-8."""

    def __init__(self, table: _Bytes, *, trim_space: bool) -> None:
        self._table = table
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._trim_space = trim_space

    def add(self, token_id: int) -> str:
        text = self._decode(self._table[token_id])
        return self._trimmed(text) if self._trim_space and text else text

    def finish(self) -> str:
        text = self._decode(b"", True)
        return self._trimmed(text) if self._trim_space and text else text

    def _trimmed(self, text: str) -> str:
        self._trim_space = False
        return text.removeprefix(" ")


class _WindowDetokenizer:
    """For all other tokenizers: decodes the last tokens with and without the latest, as text may
    depend on the tokens before."""

    def __init__(self, decode: Callable[[list[int]], str], has_text: Callable[[int], bool]) -> None:
        self._decode = decode
        self._has_text = has_text
        # Tokens whose text, `_sent`, was returned before, then those held back.
        self._window: list[int] = []
        self._sent = ""
        self._held = 0

    def add(self, token_id: int) -> str:
        if not self._has_text(token_id):
            return ""
        self._window.append(token_id)
        self._held += 1
        text = self._decode(self._window)
        half = text.endswith(_REPLACEMENT) and self._held < _HELD_TOKENS
        if half or len(text) <= len(self._sent):
            return ""
        return self._release(text)

    def finish(self) -> str:
        return self._release(self._decode(self._window)) if self._held else ""

    def _release(self, text: str) -> str:
        certain = text[len(self._sent) :]
        self._window = self._window[-self._held :]
        self._sent, self._held = self._decode(self._window), 0
        return certain


def _byte_level(name: str) -> bytes:
    """Return the bytes a name of byte-level BPE stands for; others (added tokens) as they are."""
    table: dict[str, int] = _byte_decoder()
    try:
        return bytes([table[character] for character in name])
    except KeyError:
        return name.encode()
