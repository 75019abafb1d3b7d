"""What a shard's supervisor and its child process say to each other: one JSON object a line."""

import json
from dataclasses import dataclass, field
from typing import Any

from services.runner.domain.request import Input, Message, Sampling


@dataclass(frozen=True)
class Connect:
    """Join the ring. `hosts` is this rank's MLX host list; empty for a ring of one."""

    rank: int
    hosts: tuple[str, ...]


@dataclass(frozen=True)
class Load:
    """Read layers [start, end) of the model in folder `path`; with `tensor` a part of each."""

    path: str
    start: int
    end: int
    tensor: bool


@dataclass(frozen=True)
class WarmUp:
    """Run a first request through the whole ring."""


@dataclass(frozen=True)
class Prepare:
    """On the head: turn an input into prompt tokens. Answered by Prepared or Refused."""

    request_id: str
    input: Input


@dataclass(frozen=True)
class Run:
    """Work on a request. Answered on the head by Tokens and Finished."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: Sampling
    max_token_count: int
    trace: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Cancel:
    """On the head: end a request at its next token. Quiet when it already ended."""

    request_id: str


@dataclass(frozen=True)
class Stop:
    """Flush what is to be flushed, and exit, whatever is being worked on."""


@dataclass(frozen=True)
class Connected:
    """The ring is formed."""


@dataclass(frozen=True)
class Loaded:
    """The stage's weights are in memory."""

    memory_bytes: int


@dataclass(frozen=True)
class Ready:
    """Warm-up went through the ring and gave sound numbers."""

    memory_bytes: int
    has_chat_template: bool


@dataclass(frozen=True)
class Prepared:
    """The prompt's tokens, never empty and within the model's context."""

    request_id: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Refused:
    """The input cannot be turned into a prompt; `reason` is a Reason's name."""

    request_id: str
    reason: str
    message: str
    metadata: dict[str, str]


@dataclass(frozen=True)
class Tokens:
    """Tokens that came, and the text that is certain with them."""

    request_id: str
    token_ids: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class Progress:
    """The request's prompt was processed up to here. Tells the watchdog that work goes on."""

    request_id: str
    prompt_token_count: int


@dataclass(frozen=True)
class Finished:
    """A request ended. `finish_reason` is "stop", "length" or "cancelled"; durations in seconds."""

    request_id: str
    finish_reason: str
    text: str
    completion_token_count: int
    prompt_seconds: float
    decode_seconds: float


@dataclass(frozen=True)
class Followed:
    """A rank that is not the head has done its part of a request."""

    request_id: str


@dataclass(frozen=True)
class Failed:
    """The child cannot go on and exits; `reason` is a Reason's name."""

    reason: str
    message: str


Command = Connect | Load | WarmUp | Prepare | Run | Cancel | Stop
Event = (
    Connected
    | Loaded
    | Ready
    | Prepared
    | Refused
    | Tokens
    | Progress
    | Finished
    | Followed
    | Failed
)

_KINDS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        *(Connect, Load, WarmUp, Prepare, Run, Cancel, Stop),
        *(Connected, Loaded, Ready, Prepared, Refused, Tokens, Progress, Finished),
        *(Followed, Failed),
    )
}


def encode(message: Command | Event) -> bytes:
    """Return the message as one line."""
    body = {"kind": type(message).__name__, **vars(message)}
    # Not dataclasses.asdict: it takes four times as long, once a token.
    return json.dumps(body, separators=(",", ":"), default=vars).encode() + b"\n"


def decode(line: bytes) -> Any:
    """Return the message in a line. Both ends are ours, so anything else is a defect and raises."""
    body = json.loads(line)
    kind = _KINDS[body.pop("kind")]
    for name, value in body.items():
        if isinstance(value, list):
            body[name] = tuple(value)
    if "sampling" in body:
        body["sampling"] = Sampling(**body["sampling"])
    if "input" in body:
        given = body["input"]
        messages, ids = given["messages"], given["token_ids"]
        body["input"] = Input(
            prompt=given["prompt"],
            messages=None if messages is None else tuple(Message(**m) for m in messages),
            token_ids=None if ids is None else tuple(ids),
        )
    return kind(**body)
