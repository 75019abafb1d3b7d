"""The life of a shard and of an instance."""

from collections.abc import Iterable
from enum import IntEnum


class ShardState(IntEnum):
    """Where a shard is in its life; greater is later. Numbers are those of the proto."""

    PENDING = 1
    DOWNLOADING = 2
    CONNECTING = 3
    CONNECTED = 4
    LOADING = 5
    LOADED = 6
    WARMING_UP = 7
    READY = 8
    STOPPING = 9
    STOPPED = 10
    FAILED = 11

    @property
    def ended(self) -> bool:
        """True when the shard holds nothing any more."""
        return self in (ShardState.STOPPED, ShardState.FAILED)


class InstanceState(IntEnum):
    """Where an instance is in its life. Numbers are those of the proto."""

    STARTING = 1
    READY = 2
    STOPPING = 3
    STOPPED = 4
    FAILED = 5


def instance_state(shards: Iterable[ShardState]) -> InstanceState:
    """Return the state of an instance whose ranks are in these states, as one rank sees them."""
    states = list(shards)
    if ShardState.FAILED in states:
        return InstanceState.FAILED
    if all(state is ShardState.STOPPED for state in states):
        return InstanceState.STOPPED
    if any(state in (ShardState.STOPPING, ShardState.STOPPED) for state in states):
        return InstanceState.STOPPING
    if all(state is ShardState.READY for state in states):
        return InstanceState.READY
    return InstanceState.STARTING
