"""Figures in words."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.cli.text import (
    age,
    duration,
    error_details,
    percent,
    size,
    whole_duration,
    without_controls,
)
from services.common.errors import Reason, ShardringError


@pytest.mark.parametrize(
    ("byte_count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (99_949, "99.9 kB"),
        (99_950, "100 kB"),
        (999_499, "999 kB"),
        (999_500, "1.0 MB"),
        (16_000_000_000, "16.0 GB"),
        (10**19, "10000 PB"),
    ],
)
def test_size(byte_count: int, text: str) -> None:
    assert size(byte_count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.000_42, "0.42 ms"),
        (0.009_96, "10 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1.0 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min"),
        (125, "2 min 5 s"),
        (7200, "2 h"),
        (90_000, "1 d 1 h"),
    ],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@given(st.floats(0, 1e9))
def test_no_part_of_a_duration_reaches_the_next_unit(seconds: float) -> None:
    limits = {"d": math.inf, "h": 24, "min": 60, "s": 60, "ms": 1000}
    for shown in (duration(seconds), whole_duration(seconds)):
        parts = shown.split()
        assert 2 <= len(parts) <= 4
        for number, unit in zip(parts[::2], parts[1::2], strict=True):
            assert float(number) < limits[unit]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-3, "0 s"), (59.9, "59 s"), (60, "1 min"), (7199, "1 h"), (1e6, "11 d")],
)
def test_age(seconds: float, text: str) -> None:
    assert age(seconds) == text


@pytest.mark.parametrize(
    ("fraction", "text"),
    [(0, "0 %"), (0.0001, "1 %"), (0.5, "50 %"), (0.9999, "99 %"), (1, "100 %")],
)
def test_percent_is_whole_only_when_it_is(fraction: float, text: str) -> None:
    assert percent(fraction) == text


def test_a_model_cannot_steer_the_terminal() -> None:
    assert without_controls("a\x1b[2Jb\x9b1mc\rd\n\te\u00e9") == "a[2Jb1mcd\n\te\u00e9"


def test_error_details_add_what_the_message_lacks() -> None:
    error = ShardringError(
        Reason.NOT_ENOUGH_MEMORY,
        "The model needs more than node 0f3a has.",
        metadata={"needed_bytes": 9_000_000_000, "node_id": "0f3a", "rank": 1, "empty": ""},
    )
    assert error_details(error) == "NOT_ENOUGH_MEMORY · needed: 9.0 GB · rank: 1"
