"""A generation request and the limits of its fields."""

import math
from dataclasses import dataclass

from services.common.errors import invalid_field

MAX_INPUT_BYTES = 16 * 2**20
MAX_TOP_K = 1_000_000
MAX_TOKENS = 10_000_000
MAX_TOKEN_ID = 2**31 - 1
MAX_LOGIT_BIASES = 1024
MAX_STOP_TEXTS = 16
MAX_STOP_TEXT_BYTES = 1000
MAX_STOP_TOKEN_IDS = 64
MAX_TOP_LOGPROBS = 20
MAX_CHOICES = 16


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen. Temperature 0 takes the likeliest; top_p 1, top_k 0, min_p 0: off.

    `repeatable` says that the client gave the seed. Penalties of 1 (repetition) and 0 are off.
    `logit_bias` holds (token id, what is added).
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    repeatable: bool = False
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Stop:
    """What ends a generation beside its count of tokens."""

    texts: tuple[str, ...] = ()
    token_ids: tuple[int, ...] = ()
    ignore_end_tokens: bool = False


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


@dataclass(frozen=True)
class GenerationRequest:
    """One call of Generate. `max_token_count` 0: as many as fit. `top_logprob_count` None: no
    log-probabilities."""

    input: Input
    sampling: Sampling = Sampling()
    stop: Stop = Stop()
    max_token_count: int = 0
    top_logprob_count: int | None = None
    choice_count: int = 1


@dataclass(frozen=True)
class TokenLogprob:
    """A token, its text alone, and the natural logarithm of its probability."""

    token_id: int
    text: str
    logprob: float


@dataclass(frozen=True)
class ChosenLogprob:
    """A generated token's log-probability, and the likeliest ones' in its place, best first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


def check_request(request: GenerationRequest) -> None:
    """Raise ShardringError(INVALID_FIELD), naming the field, for what no model could answer.

    What depends on the model (its vocabulary, its context) is for its tokenizer to refuse.
    """
    check_input(request.input)
    check_sampling(request.sampling)
    check_max_token_count(request.max_token_count)
    check_stop(request.stop)
    if request.top_logprob_count is not None:
        count, most = request.top_logprob_count, MAX_TOP_LOGPROBS
        _within("top_logprob_count", count, 0, most, f"0 to {most}")
    _within("choice_count", request.choice_count, 1, MAX_CHOICES, f"1 to {MAX_CHOICES}")


def check_sampling(sampling: Sampling) -> None:
    """Raise ShardringError(INVALID_FIELD) for values no sampler can mean."""
    _within("sampling.temperature", sampling.temperature, 0, 10, "0 to 10")
    _above_zero("sampling.top_p", sampling.top_p, 1)
    _within("sampling.top_k", sampling.top_k, 0, MAX_TOP_K, f"0 to {MAX_TOP_K}")
    _within("sampling.min_p", sampling.min_p, 0, 1, "0 to 1")
    _within("sampling.seed", sampling.seed, 0, 2**63 - 1, "0 to 2^63 - 1")
    _above_zero("sampling.repetition_penalty", sampling.repetition_penalty, 10)
    _within("sampling.frequency_penalty", sampling.frequency_penalty, -2, 2, "-2 to 2")
    _within("sampling.presence_penalty", sampling.presence_penalty, -2, 2, "-2 to 2")
    _at_most("sampling.logit_bias", len(sampling.logit_bias), MAX_LOGIT_BIASES)
    for token_id, bias in sampling.logit_bias:
        _token_id("sampling.logit_bias", token_id)
        _within(f"sampling.logit_bias[{token_id}]", bias, -100, 100, "-100 to 100")


def check_stop(stop: Stop) -> None:
    """Raise ShardringError(INVALID_FIELD) for too many conditions, and for what can't come."""
    _at_most("stop.texts", len(stop.texts), MAX_STOP_TEXTS)
    for index, text in enumerate(stop.texts):
        size = len(text.encode())
        if not 1 <= size <= MAX_STOP_TEXT_BYTES:
            expected = f"1 to {MAX_STOP_TEXT_BYTES} bytes"
            raise invalid_field(f"stop.texts[{index}]", f"{size} bytes", expected)
    _at_most("stop.token_ids", len(stop.token_ids), MAX_STOP_TOKEN_IDS)
    for token_id in stop.token_ids:
        _token_id("stop.token_ids", token_id)


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


def _above_zero(field: str, value: float, high: float) -> None:
    expected = f"above 0, to {high}"
    if value <= 0:
        raise invalid_field(field, value, expected)
    _within(field, value, 0, high, expected)


def _at_most(field: str, count: int, most: int) -> None:
    if count > most:
        raise invalid_field(field, f"{count} entries", f"at most {most}")


def _token_id(field: str, token_id: int) -> None:
    _within(field, token_id, 0, MAX_TOKEN_ID, f"token ids, 0 to {MAX_TOKEN_ID}")


def _within(field: str, value: float, low: float, high: float, expected: str) -> None:
    if not math.isfinite(value) or not low <= value <= high:
        raise invalid_field(field, value, expected)
