"""Shards and instances as one node can tell them to others."""

from dataclasses import dataclass

from services.common.errors import ShardringError
from services.runner.domain.ring import Ring
from services.runner.domain.state import InstanceState, ShardState, instance_state


@dataclass(frozen=True)
class ShardView:
    """One shard. `state_time` is in seconds since the epoch."""

    rank: int
    state: ShardState
    state_time: float
    error: ShardringError | None = None
    memory_bytes: int = 0
    download_fraction: float = 0.0


@dataclass(frozen=True)
class InstanceView:
    """One instance; `rank` is the telling node's. `create_time` is in seconds since the epoch."""

    instance_id: str
    ring: Ring
    rank: int
    shards: tuple[ShardView, ...]
    create_time: float
    request_count: int = 0
    has_chat_template: bool = False

    @property
    def state(self) -> InstanceState:
        """Where the instance is in its life."""
        return instance_state(shard.state for shard in self.shards)

    @property
    def error(self) -> ShardringError | None:
        """Why it failed."""
        return next((shard.error for shard in self.shards if shard.error), None)
