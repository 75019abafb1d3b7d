"""Moments and durations as messages, and back.

Not by the messages' own methods, which raise for what is out of range: whether a figure makes sense
is for each service's rules to say.
"""

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

_SECOND = 10**9


def nanoseconds(message: Duration | Timestamp) -> int:
    """Return a duration, or a moment since 1970, unchecked."""
    return message.seconds * _SECOND + message.nanos


def seconds(message: Duration | Timestamp) -> float:
    """Return a duration, or a moment since 1970, in seconds, unchecked."""
    return nanoseconds(message) / _SECOND


def duration(count: int) -> Duration:
    """Return a duration of some nanoseconds as a message."""
    return Duration(seconds=count // _SECOND, nanos=count % _SECOND)


def timestamp(count: int) -> Timestamp:
    """Return the moment some nanoseconds after 1970 as a message."""
    return Timestamp(seconds=count // _SECOND, nanos=count % _SECOND)


def duration_of(length: float) -> Duration:
    """Return a duration of some seconds as a message."""
    return duration(round(length * _SECOND))


def timestamp_of(moment: float) -> Timestamp:
    """Return the moment some seconds after 1970 as a message."""
    return timestamp(round(moment * _SECOND))
