"""Prompts, and the token ids that a model doesn't have."""

from pathlib import Path

import pytest

from services.cli.walkthrough import MODEL, MODELS
from services.common.errors import Reason, ShardringError
from services.runner.domain.request import Input, Message, Sampling
from services.runner.engine.text import Tokenizer
from tests.unit.runner.tokenizers_made import byte_level


@pytest.fixture(scope="module")
def tiny() -> Tokenizer:
    return Tokenizer(MODELS / MODEL)


@pytest.mark.parametrize("token_id", [-1, 1024, 2**31 - 1])
def test_ids_outside_the_vocabulary_are_refused(tiny: Tokenizer, token_id: int) -> None:
    asked = [
        ("input.token_ids", Input(token_ids=(5, token_id)), Sampling()),
        ("sampling.logit_bias", Input(prompt="hi"), Sampling(logit_bias=((5, 1), (token_id, 1)))),
    ]
    for field, given, sampling in asked:
        with pytest.raises(ShardringError) as refusal:
            tiny.prepare(given, sampling)
        assert refusal.value.reason is Reason.INVALID_FIELD
        assert refusal.value.metadata == {
            "field": field,
            "value": str(token_id),
            "expected": "0 to 1023",
        }


def test_sound_ids_pass(tiny: Tokenizer) -> None:
    sampling = Sampling(logit_bias=((0, 1), (1023, 1)))
    assert tiny.prepare(Input(token_ids=(0, 1023)), sampling) == (0, 1023)
    assert tiny.prepare(Input(token_ids=(0, 1023))) == (0, 1023)


def test_ids_of_a_padded_vocabulary_pass(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path)
    assert tokenizer.prepare(Input(token_ids=(269,))) == (269,)
    with pytest.raises(ShardringError):
        tokenizer.prepare(Input(token_ids=(270,)))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (Input(prompt=""), Reason.PROMPT_EMPTY),
        (Input(token_ids=()), Reason.PROMPT_EMPTY),
        (Input(messages=(Message("user", ""),)), Reason.PROMPT_EMPTY),
        (Input(token_ids=(5,) * 512), Reason.PROMPT_TOO_LONG),
    ],
)
def test_prompts_that_are_none_are_refused(tiny: Tokenizer, given: Input, reason: Reason) -> None:
    with pytest.raises(ShardringError) as refusal:
        tiny.prepare(given)
    assert refusal.value.reason is reason


def test_a_model_without_template_takes_no_messages(tmp_path: Path) -> None:
    with pytest.raises(ShardringError) as refusal:
        byte_level(tmp_path).prepare(Input(messages=(Message("user", "hi"),)))
    assert refusal.value.reason is Reason.NO_CHAT_TEMPLATE
