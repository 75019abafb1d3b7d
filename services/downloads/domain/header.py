"""The head of a safetensors file: which tensors it holds, of what type and size.

Format: https://huggingface.co/docs/safetensors/index#format. Eight bytes little endian give the
length of a JSON object that follows: name -> {dtype, shape, data_offsets [begin, end)}.
"""

import json
from dataclasses import dataclass
from typing import Any

# As huggingface_hub: far above any real header, and small enough to hold.
MAX_HEADER_BYTES = 25_000_000
LENGTH_BYTES = 8


class Malformed(ValueError):
    """A file that contradicts itself or its format; the message says how."""


@dataclass(frozen=True)
class Tensor:
    """One tensor's element type, such as "BF16", and its size."""

    dtype: str
    size_bytes: int


@dataclass(frozen=True)
class Header:
    """The tensors of one file by name, and the size the whole file must have."""

    tensors: dict[str, Tensor]
    file_bytes: int


def header_length(head: bytes) -> int:
    """Return how many bytes of JSON follow the first eight. Raises Malformed."""
    if len(head) < LENGTH_BYTES:
        raise Malformed("it is too short for a safetensors file")
    length = int.from_bytes(head[:LENGTH_BYTES], "little")
    if not 2 <= length <= MAX_HEADER_BYTES:
        raise Malformed(f"its header claims {length} bytes")
    return length


def parse_header(text: bytes) -> Header:
    """Read the JSON part. Raises Malformed unless its tensors lie one behind the other."""
    entries = parse_object(text)
    tensors, spans = {}, []
    for name, entry in entries.items():
        if name == "__metadata__":
            continue
        try:
            dtype, (begin, end) = entry["dtype"], entry["data_offsets"]
        except (TypeError, KeyError, ValueError) as error:
            raise Malformed(f"tensor {name[:80]!r} lacks a dtype or offsets") from error
        if not isinstance(dtype, str) or type(begin) is not int or type(end) is not int:
            raise Malformed(f"tensor {name[:80]!r} has a dtype or offsets of the wrong kind")
        if not 0 <= begin <= end:
            raise Malformed(f"tensor {name[:80]!r} lies at [{begin}, {end})")
        tensors[name] = Tensor(dtype, end - begin)
        spans.append((begin, end))
    position = 0
    for begin, end in sorted(spans):
        if begin != position:
            raise Malformed("its tensors overlap or leave gaps")
        position = end
    return Header(tensors, LENGTH_BYTES + len(text) + position)


def parse_object(text: bytes) -> dict[str, Any]:
    """Read a JSON object. Raises Malformed for anything else, however deep or odd."""
    try:
        value = json.loads(text)
        if b"\\ud" in text.lower():
            # Half of a surrogate pair is no text: no message and no file can hold it.
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise Malformed("it is not JSON") from error
    if not isinstance(value, dict):
        raise Malformed("it is not a JSON object")
    return value
