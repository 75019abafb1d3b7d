"""What a shard's supervisor and its child process say to each other: one JSON object a line."""

import json
from dataclasses import dataclass, field
from typing import Any

from services.runner.domain.request import GenerationRequest, Input, Message, Sampling, Stop


@dataclass(frozen=True)
class Connect:
    """Join the ring. `hosts` is this rank's MLX host list; empty for a ring of one."""

    rank: int
    hosts: tuple[str, ...]


@dataclass(frozen=True)
class Load:
    """Read layers [start, end) of the model in folder `path`; with `tensor` a part of each.

    `cache_limit_bytes`: what key-value caches may take. `cache_bits` and
    `max_cache_tokens` as in InstanceOptions.
    """

    path: str
    start: int
    end: int
    tensor: bool
    cache_limit_bytes: int
    cache_bits: int = 0
    max_cache_tokens: int = 0


@dataclass(frozen=True)
class WarmUp:
    """Run a first request through the whole ring, then serve."""


@dataclass(frozen=True)
class Prepare:
    """On the head: turn a request's input into prompt tokens. Answered by Prepared or Refused."""

    request_id: str
    request: GenerationRequest


@dataclass(frozen=True)
class Run:
    """On the head: answer a prompt. Answered by Started, Tokens and Finished, or by Refused."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: Sampling
    stop: Stop = field(default_factory=Stop)
    max_token_count: int = 0
    top_logprob_count: int | None = None
    trace: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Cancel:
    """On the head: end a request at its next step. Quiet when it already ended."""

    request_id: str


@dataclass(frozen=True)
class Exit:
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
    """Warm-up went through the ring and gave sound numbers.

    `step_seconds`: how long a chunk of a prompt took, on the head.
    """

    memory_bytes: int
    has_chat_template: bool
    step_seconds: float


@dataclass(frozen=True)
class Prepared:
    """The prompt's tokens, never empty and within the model's context."""

    request_id: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Refused:
    """The request cannot be worked on; `reason` is a Reason's name."""

    request_id: str
    reason: str
    message: str
    metadata: dict[str, str]


@dataclass(frozen=True)
class Started:
    """A request left the queue."""

    request_id: str


@dataclass(frozen=True)
class Tokens:
    """What one step gave: (request id, token ids, text that is certain, log-probabilities).

    The last is None, or for each token [id, text, logprob, [[id, text, logprob] of the likeliest]].
    """

    pieces: tuple[tuple[str, tuple[int, ...], str, list[Any] | None], ...]


@dataclass(frozen=True)
class Finished:
    """A request ended. `finish_reason` is "stop", "length" or "cancelled"; durations in seconds.

    `stop_text` or `stop_token_id` say which of the request's own stops ended it.
    """

    request_id: str
    finish_reason: str
    text: str
    completion_token_count: int
    cached_token_count: int
    queue_seconds: float
    prompt_seconds: float
    decode_seconds: float
    stop_text: str | None = None
    stop_token_id: int | None = None


@dataclass(frozen=True)
class Usage:
    """What a rank spends, over the time since the last one. At most once a second, while it works.

    `working` False: it holds no request and waits for no step any more, and nothing follows until
    it does again.
    """

    working: bool
    busy_fraction: float
    cache_bytes: int
    cache_limit_bytes: int
    prefix_cache_bytes: int


@dataclass(frozen=True)
class Working:
    """What the head does, over the time since the last one; comes with its Usage.

    `step_count`: steps that came back through the ring.
    """

    step_count: int
    running_count: int
    queued_count: int
    prompt_tokens_per_second: float
    completion_tokens_per_second: float
    batch_occupancy: float


@dataclass(frozen=True)
class Failed:
    """The child cannot go on and exits; `reason` is a Reason's name."""

    reason: str
    message: str


Command = Connect | Load | WarmUp | Prepare | Run | Cancel | Exit
Event = (
    Connected
    | Loaded
    | Ready
    | Prepared
    | Refused
    | Started
    | Tokens
    | Finished
    | Usage
    | Working
    | Failed
)

_KINDS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        *(Connect, Load, WarmUp, Prepare, Run, Cancel, Exit),
        *(Connected, Loaded, Ready, Prepared, Refused, Started, Tokens, Finished),
        *(Usage, Working, Failed),
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
    if kind is Run:
        body["sampling"], body["stop"] = sampling_of(body["sampling"]), _stop(body["stop"])
    elif kind is Prepare:
        body["request"] = _request(body["request"])
    return kind(**body)


def _request(given: dict[str, Any]) -> GenerationRequest:
    messages, ids = given["input"]["messages"], given["input"]["token_ids"]
    wanted = Input(
        prompt=given["input"]["prompt"],
        messages=None if messages is None else tuple(Message(**m) for m in messages),
        token_ids=None if ids is None else tuple(ids),
    )
    sampling, stop = sampling_of(given["sampling"]), _stop(given["stop"])
    return GenerationRequest(**{**given, "input": wanted, "sampling": sampling, "stop": stop})


def sampling_of(given: dict[str, Any]) -> Sampling:
    """Read what a Sampling became on its way through JSON."""
    return Sampling(**{**given, "logit_bias": tuple(map(tuple, given["logit_bias"]))})


def _stop(given: dict[str, Any]) -> Stop:
    return Stop(tuple(given["texts"]), tuple(given["token_ids"]), given["ignore_end_tokens"])
