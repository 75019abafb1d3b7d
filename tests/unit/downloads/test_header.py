"""Safetensors heads: what is read, and what is refused without harm."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.downloads.domain.header import (
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    Malformed,
    Tensor,
    header_length,
    parse_header,
    parse_object,
)
from tests.fakes.tiny_model import safetensors


def test_a_header_tells_tensors_and_the_file_size() -> None:
    file = safetensors({"a": 10, "b": 6}, dtype="F16")
    length = header_length(file)
    header = parse_header(file[LENGTH_BYTES : LENGTH_BYTES + length])
    assert header.tensors == {"a": Tensor("F16", 10), "b": Tensor("F16", 6)}
    assert header.file_bytes == len(file)


@pytest.mark.parametrize("head", [b"", b"1234567", b"\xff" * 8, (1).to_bytes(8, "little")])
def test_absurd_lengths_are_refused(head: bytes) -> None:
    with pytest.raises(Malformed):
        header_length(head)


def test_the_longest_header_is_bounded() -> None:
    assert header_length(MAX_HEADER_BYTES.to_bytes(8, "little")) == MAX_HEADER_BYTES
    with pytest.raises(Malformed):
        header_length((MAX_HEADER_BYTES + 1).to_bytes(8, "little"))


@pytest.mark.parametrize(
    "entry",
    [
        None,
        [],
        {"dtype": "F32"},
        {"dtype": 3, "data_offsets": [0, 4]},
        {"dtype": "F32", "data_offsets": [0]},
        {"dtype": "F32", "data_offsets": "04"},
        {"dtype": "F32", "data_offsets": [4, 0]},
        {"dtype": "F32", "data_offsets": [-4, 0]},
        {"dtype": "F32", "data_offsets": [0.0, 4.0]},
        {"dtype": "F32", "data_offsets": [False, True]},
        {"dtype": "F32", "data_offsets": [2, 4]},
    ],
)
def test_contradictions_are_refused(entry: object) -> None:
    with pytest.raises(Malformed):
        parse_header(json.dumps({"a": entry}).encode())


def test_tensors_that_share_bytes_are_refused() -> None:
    entry = {"dtype": "F32", "data_offsets": [0, 4]}
    with pytest.raises(Malformed):
        parse_header(json.dumps({"a": entry, "b": entry}).encode())


@given(st.binary(max_size=200))
def test_no_bytes_do_harm(text: bytes) -> None:
    try:
        parse_header(text)
    except Malformed:
        return
    assert text.strip().startswith(b"{")


@pytest.mark.parametrize(
    "text", [b"[" * 100_000, b'{"a":' * 50_000, b"1" * 10_000, b"\xff\xfe", b"3"]
)
def test_deep_and_odd_json_is_refused(text: bytes) -> None:
    with pytest.raises(Malformed):
        parse_object(text)
