"""What is said between a supervisor and its child arrives as it was said."""

import pytest

from services.runner.child_protocol import (
    Cancel,
    Command,
    Connect,
    Event,
    Finished,
    Load,
    Prepare,
    Refused,
    Run,
    Stop,
    Tokens,
    decode,
    encode,
)
from services.runner.domain.request import Input, Message, Sampling


@pytest.mark.parametrize(
    "message",
    [
        Connect(1, ("127.0.0.1:1", "0.0.0.0:2")),
        Load("/models/a b", 3, 5, tensor=False),
        Prepare("r", Input(prompt="two\nlines, ü, \u2028, 🦊")),
        Prepare("r", Input(messages=(Message("user", "hi"), Message("assistant", "")))),
        Prepare("r", Input(token_ids=(1, 2, 3))),
        Run("r", (1, 2), Sampling(temperature=0.5, seed=2**63 - 1), 7, {"traceparent": "00-a"}),
        Cancel("r"),
        Stop(),
        Refused("r", "PROMPT_EMPTY", "Say something.", {"a": "b"}),
        Tokens("r", (5,), "é"),
        Finished("r", "stop", "", 3, 0.5, 0.25),
    ],
)
def test_a_message_survives(message: Command | Event) -> None:
    line = encode(message)
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    assert decode(line) == message
