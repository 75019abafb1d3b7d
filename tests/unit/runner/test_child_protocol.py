"""What is said between a supervisor and its child arrives as it was said."""

import pytest

from services.runner.child_protocol import (
    Cancel,
    Command,
    Connect,
    Event,
    Exit,
    Failed,
    Finished,
    Load,
    Prepare,
    Prepared,
    Ready,
    Refused,
    Run,
    Tokens,
    Usage,
    WarmUp,
    Working,
    decode,
    encode,
)
from services.runner.domain.request import GenerationRequest, Input, Message, Sampling, Stop

_SAMPLING = Sampling(temperature=0.5, seed=2**63 - 1, logit_bias=((3, -1.5), (7, 100.0)))
_STOP = Stop(("two\nlines", "🦊"), (4, 5), ignore_end_tokens=True)
_MESSAGES = (Message("user", "hi"), Message("assistant", ""))


@pytest.mark.parametrize(
    "message",
    [
        Connect(1, ("127.0.0.1:1", "0.0.0.0:2")),
        Load("/models/a b", 3, 5, False, 0),
        Load("/models/a b", 3, 5, True, 2**40, 8, 1000),
        WarmUp(),
        Prepare("r", GenerationRequest(Input(prompt="two\nlines, ü, \u2028, 🦊"))),
        Prepare("r", GenerationRequest(Input(messages=_MESSAGES), top_logprob_count=0)),
        Prepare("r", GenerationRequest(Input(token_ids=(1, 2, 3)), _SAMPLING, _STOP, 7, None, 3)),
        Run("r", (1, 2), _SAMPLING, _STOP, 7, 20, {"traceparent": "00-a"}),
        Cancel("r"),
        Exit(),
        Ready(2**40, True, 0.25),
        Prepared("r", (1, 2)),
        Refused("r", "PROMPT_EMPTY", "Say something.", {"a": "b"}),
        Finished("r", "stop", "", 3, 1, 0.5, 0.25, 0.125, stop_text="🦊"),
        Finished("r", "stop", "", 3, 1, 0.5, 0.25, 0.125, stop_token_id=4),
        Usage(True, 0.5, 1, 2, 3),
        Working(1, 2, 3, 4.0, 5.0, 6.0),
        Failed("SHARD_FAILED", "two\nlines"),
    ],
)
def test_a_message_survives(message: Command | Event) -> None:
    line = encode(message)
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    assert decode(line) == message


def test_tokens_survive() -> None:
    """But for their tuples, which arrive as lists: making tuples of all would take its time."""
    logprobs = [[5, "é", -0.5, [[5, "é", -0.5], [6, "\n", -1.5]]]]
    told = decode(encode(Tokens((("r", (5,), "é", logprobs), ("s", (7, 8), "", None)))))
    assert isinstance(told, Tokens)
    (first, first_ids, first_text, first_logprobs), (second, ids, text, none) = told.pieces
    assert (first, list(first_ids), first_text, first_logprobs) == ("r", [5], "é", logprobs)
    assert (second, list(ids), text, none) == ("s", [7, 8], "", None)
