"""A generation request and the limits of its fields."""

import math
from dataclasses import dataclass

from services.common.errors import invalid_field

MAX_INPUT_BYTES = 16 * 2**20
MAX_TOP_K = 1_000_000
MAX_TOKENS = 10_000_000


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen. Temperature 0 takes the likeliest; top_p 1, top_k 0, min_p 0: off."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str


@dataclass(frozen=True)
class Input:
    """What to continue: exactly one of the three."""

    prompt: str | None = None
    messages: tuple[Message, ...] | None = None
    token_ids: tuple[int, ...] | None = None


def check_sampling(sampling: Sampling) -> None:
    """Raise ShardringError(INVALID_FIELD) for values no sampler can mean."""
    _within("sampling.temperature", sampling.temperature, 0, 10, "0 to 10")
    if sampling.top_p <= 0:
        raise invalid_field("sampling.top_p", sampling.top_p, "above 0, to 1")
    _within("sampling.top_p", sampling.top_p, 0, 1, "above 0, to 1")
    _within("sampling.top_k", sampling.top_k, 0, MAX_TOP_K, f"0 to {MAX_TOP_K}")
    _within("sampling.min_p", sampling.min_p, 0, 1, "0 to 1")
    _within("sampling.seed", sampling.seed, 0, 2**63 - 1, "0 to 2^63 - 1")


def check_max_token_count(count: int) -> None:
    """Raise ShardringError(INVALID_FIELD) unless it is 0 (no limit) or a sensible count."""
    _within("max_token_count", count, 0, MAX_TOKENS, f"0 to {MAX_TOKENS}")


def check_input(given: Input) -> None:
    """Raise ShardringError(INVALID_FIELD) when there is no input, or far too much."""
    if given.prompt is None and given.messages is None and given.token_ids is None:
        raise invalid_field("input", "none", "a prompt, messages or token ids")
    texts = [given.prompt or "", *(message.content for message in given.messages or ())]
    size = sum(len(text) for text in texts)
    if size > MAX_INPUT_BYTES:
        raise invalid_field("input", f"{size} characters", f"at most {MAX_INPUT_BYTES}")
    for message in given.messages or ():
        if not message.role:
            raise invalid_field("input.messages.role", "", 'a role such as "user"')
    if given.messages == ():
        raise invalid_field("input.messages", "none", "at least one message")


def _within(field: str, value: float, low: float, high: float, expected: str) -> None:
    if not math.isfinite(value) or not low <= value <= high:
        raise invalid_field(field, value, expected)
