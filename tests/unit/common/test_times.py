"""Moments and durations as messages, and back."""

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from services.common.times import duration_of, nanoseconds, seconds, timestamp_of


@pytest.mark.parametrize("length", [0.0, 0.25, 1.5, 86_400.000001])
def test_what_goes_out_comes_back(length: float) -> None:
    assert seconds(duration_of(length)) == length
    assert duration_of(length).ToNanoseconds() == nanoseconds(duration_of(length))
    assert seconds(timestamp_of(length)) == length


def test_what_is_out_of_range_is_returned_for_the_rules_to_refuse() -> None:
    absurd = Timestamp(seconds=2**62, nanos=-5)
    with pytest.raises(ValueError, match="range"):
        absurd.ToNanoseconds()
    assert nanoseconds(absurd) == 2**62 * 10**9 - 5
