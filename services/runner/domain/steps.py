"""What the head's schedule is made of: sequences, steps that compute them, and commands.

Commands travel with steps: small lists whose first entry is one of the names in `Command`.
"""

from dataclasses import dataclass, field
from enum import StrEnum


class Command(StrEnum):
    """What a rank does with its caches before a step."""

    OPEN = "open"  # sequence, entry, length: empty caches, or a kept entry's first tokens
    KEEP = "keep"  # sequence, entry: keep a copy of a prompt's caches
    JOIN = "join"  # sequence, lane: from prompt to lane
    LEAVE = "leave"  # sequence, lane, entry: out of the lane; entry 0: its caches are dropped
    MOVE = "move"  # sequence, lane, lane: from one lane to another
    CLOSE = "close"  # sequence: drop the caches of a prompt
    DROP = "drop"  # entry


Commands = list[list[int | str]]


@dataclass(eq=False)
class Sequence:
    """One answer on its way.

    `tokens` are the prompt's and those generated; the caches hold the first `computed`, counting
    what is on its way. `limit` bounds them. `exact`: computed as if it were the only one, never
    batched, and re-using only what whole chunks computed. `in_lane`: None outside of lanes.
    """

    sequence_id: int
    tokens: list[int]
    limit: int
    exact: bool = False
    computed: int = 0
    reserved: int = 0
    exact_count: int = 0
    in_lane: int | None = None
    # Tokens of kept caches that the prompt began with.
    reused: int = 0
    # Its prompt begins like this one's, which is being computed.
    waits_for: "Sequence | None" = None
    started: bool = False
    ended: bool = False
    # Counts how often it was set back.
    attempt: int = 0
    prompt_count: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_count = len(self.tokens)

    @property
    def prompt_left(self) -> int:
        """Tokens to be computed before the first step in a lane, which takes the last one."""
        return len(self.tokens) - 1 - self.computed


@dataclass(frozen=True)
class Prefill:
    """Compute part of a prompt."""

    commands: Commands
    sequence: Sequence
    tokens: list[int]


@dataclass(frozen=True)
class Decode:
    """One token for each sequence of a lane. `tokens` None: those its last step is choosing."""

    commands: Commands
    lane_id: int
    sequences: tuple[Sequence, ...]
    attempts: tuple[int, ...]
    tokens: list[int] | None


@dataclass(frozen=True)
class Tidy:
    """Nothing to compute, only commands."""

    commands: Commands


Step = Prefill | Decode | Tidy
