"""What a shard does next: one pure function of its own state and its siblings' states."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

from services.runner.domain.state import ShardState


class Action(Enum):
    """The next thing to do."""

    WAIT = auto()
    DOWNLOAD = auto()
    CONNECT = auto()
    LOAD = auto()
    WARM_UP = auto()
    STOP = auto()
    FAIL = auto()


@dataclass(frozen=True)
class View:
    """What one shard knows.

    `siblings` holds the last known state of every other rank. `files_complete` says that the
    shard's own files are on disk. `busy` says that an action it began has not ended.
    """

    rank: int
    world_size: int
    state: ShardState
    siblings: Mapping[int, ShardState]
    files_complete: bool = False
    busy: bool = False

    @property
    def connects(self) -> bool:
        """True for the last rank: the one that dials first, when the others are listening."""
        return self.rank == self.world_size - 1


# How long nothing at all may change while a shard is in a state, in seconds. The download has its
# own limits, where it happens; READY has none.
_LIMITS = {
    ShardState.PENDING: 30.0,
    ShardState.DOWNLOADING: 600.0,
    ShardState.CONNECTING: 60.0,
    ShardState.CONNECTED: 60.0,
    ShardState.LOADING: 900.0,
    ShardState.LOADED: 900.0,
    ShardState.WARMING_UP: 300.0,
    ShardState.STOPPING: 10.0,
}


def next_action(view: View) -> Action:
    """Return what to do now; call it again whenever anything in `view` changes."""
    if view.state >= ShardState.STOPPING:
        return Action.WAIT
    others = view.siblings.values()
    if ShardState.FAILED in others:
        return Action.FAIL
    if any(state >= ShardState.STOPPING for state in others):
        return Action.STOP
    if view.busy:
        return Action.WAIT
    match view.state:
        case ShardState.PENDING:
            return Action.DOWNLOAD
        case ShardState.DOWNLOADING if view.files_complete:
            # Ranks that accept may wait in the ring for long; the last one gives up in 31 s, so it
            # begins when all others are there.
            all_there = all(state >= ShardState.CONNECTING for state in others)
            return Action.CONNECT if not view.connects or all_there else Action.WAIT
        case ShardState.CONNECTED:
            # Every rank has its files when it is connecting.
            all_complete = all(state >= ShardState.CONNECTING for state in others)
            return Action.LOAD if all_complete else Action.WAIT
        case ShardState.LOADED:
            awaited = ShardState.WARMING_UP if view.connects else ShardState.LOADED
            return Action.WARM_UP if all(s >= awaited for s in others) else Action.WAIT
        case _:
            return Action.WAIT


def stall_limit(view: View) -> float | None:
    """Return for how many seconds nothing may change before the shard has to fail; None: for ever.

    The rank furthest behind sets it: one that waits in the ring waits as long as others download.
    """
    return _LIMITS.get(min((view.state, *view.siblings.values())))


def missing_ranks(view: View) -> list[int]:
    """Return the ranks that the shard is waiting for: those furthest behind, itself included."""
    states = {**view.siblings, view.rank: view.state}
    behind = min(states.values())
    return sorted(rank for rank, state in states.items() if state == behind)
