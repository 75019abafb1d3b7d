"""Shards and instances as one node can tell them to others."""

from dataclasses import dataclass, replace

from services.common.errors import ShardringError
from services.runner.domain.ring import Ring
from services.runner.domain.state import InstanceState, ShardState, instance_state


@dataclass(frozen=True)
class ShardUsage:
    """What a shard spends. `busy_fraction` is of the last few seconds, 0 to 1."""

    busy_fraction: float = 0.0
    cache_bytes: int = 0
    cache_limit_bytes: int = 0
    prefix_cache_bytes: int = 0


@dataclass(frozen=True)
class InstanceLoad:
    """What an instance is doing, over the last few seconds; as the proto's message says."""

    running_count: int = 0
    queued_count: int = 0
    prompt_tokens_per_second: float = 0.0
    completion_tokens_per_second: float = 0.0
    batch_occupancy: float = 0.0


@dataclass(frozen=True)
class ShardView:
    """One shard. `state_time` is in seconds since the epoch.

    `usage` is there while it is READY; `log_lines` are the last of its process, oldest first.
    """

    rank: int
    state: ShardState
    state_time: float
    error: ShardringError | None = None
    memory_bytes: int = 0
    download_fraction: float = 0.0
    usage: ShardUsage | None = None
    log_lines: tuple[str, ...] = ()


@dataclass(frozen=True)
class InstanceView:
    """One instance; `rank` is the telling node's. `create_time` is in seconds since the epoch.

    `load` is there on the head, while it is READY.
    """

    instance_id: str
    ring: Ring
    rank: int
    shards: tuple[ShardView, ...]
    create_time: float
    request_count: int = 0
    has_chat_template: bool = False
    mlx_engine_port: int = 0
    load: InstanceLoad | None = None

    def without_logs(self) -> "InstanceView":
        """Return the same without its shards' log lines."""
        return replace(self, shards=tuple(replace(s, log_lines=()) for s in self.shards))

    @property
    def state(self) -> InstanceState:
        """Where the instance is in its life."""
        return instance_state(shard.state for shard in self.shards)

    @property
    def error(self) -> ShardringError | None:
        """Why it failed."""
        return next((shard.error for shard in self.shards if shard.error), None)
