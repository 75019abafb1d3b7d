"""Generation requests and answers, between messages and plain data."""

from typing import Any

import pytest

from services.runner.domain.request import (
    ChosenLogprob,
    GenerationRequest,
    Input,
    Message,
    Sampling,
    Stop,
    TokenLogprob,
)
from services.runner.requests import Completion, Part
from services.runner.rpc.convert import generation_from_proto, part_to_proto
from shardring.runner.v1 import instance_service_pb2 as pb
from shardring.runner.v1 import runner_pb2


def test_what_is_not_given_is_off() -> None:
    read = generation_from_proto(pb.GenerateRequest(), 5)
    assert read == GenerationRequest(Input(), Sampling(seed=5))
    assert not read.sampling.repeatable


def test_everything_that_is_given_is_read() -> None:
    request = pb.GenerateRequest(
        input=runner_pb2.GenerationInput(
            messages=runner_pb2.ChatMessages(
                messages=[runner_pb2.ChatMessage(role="user", content="hi")]
            )
        ),
        sampling=runner_pb2.Sampling(
            temperature=0.5,
            top_p=0.0,
            top_k=3,
            min_p=0.25,
            seed=0,
            repetition_penalty=0.0,
            frequency_penalty=-1,
            presence_penalty=2,
            logit_bias={9: 1.5, 3: -2},
        ),
        max_token_count=7,
        stop=runner_pb2.StopConditions(texts=["a", "b"], token_ids=[4, 5], ignore_end_tokens=True),
        top_logprob_count=0,
        choice_count=2,
    )
    assert generation_from_proto(request, 5) == GenerationRequest(
        Input(messages=(Message("user", "hi"),)),
        # Zeros that were given are not taken for none: they are for the checks to refuse.
        Sampling(0.5, 0.0, 3, 0.25, 0, True, 0.0, -1, 2, ((3, -2.0), (9, 1.5))),
        Stop(("a", "b"), (4, 5), True),
        7,
        0,
        2,
    )


def test_tokens_are_written_with_their_log_probabilities() -> None:
    top = (TokenLogprob(3, "a", -0.5), TokenLogprob(4, "\ufffd", -1.5))
    part = Part((3,), "a", 1, (ChosenLogprob(top[0], top),))
    assert part_to_proto(part) == pb.GenerateResponse(
        text="a",
        token_ids=[3],
        choice_index=1,
        logprobs=[
            runner_pb2.ChosenLogprob(
                chosen=runner_pb2.TokenLogprob(token_id=3, text="a", logprob=-0.5),
                top=[
                    runner_pb2.TokenLogprob(token_id=3, text="a", logprob=-0.5),
                    runner_pb2.TokenLogprob(token_id=4, text="\ufffd", logprob=-1.5),
                ],
            )
        ],
    )
    assert not part_to_proto(Part((3,), "a")).logprobs


@pytest.mark.parametrize(
    ("ended", "stop"),
    [
        ({"finish_reason": "stop", "stop_text": "\n"}, "stop_text"),
        ({"finish_reason": "stop", "stop_token_id": 0}, "stop_token_id"),
        ({"finish_reason": "stop"}, None),
        ({"finish_reason": "length"}, None),
    ],
)
def test_an_end_is_written_with_what_ended_it(ended: dict[str, Any], stop: str | None) -> None:
    completion = Completion(
        text="x",
        prompt_token_count=3,
        completion_token_count=4,
        cached_token_count=2,
        queue_seconds=0.5,
        prompt_seconds=1.5,
        decode_seconds=2.5,
        choice_index=1,
        **ended,
    )
    written = part_to_proto(completion)
    assert (written.text, written.choice_index) == ("x", 1)
    figures = written.completion
    assert figures.WhichOneof("stop") == stop
    if stop is not None:
        assert getattr(figures, stop) == ended[stop]
    name = runner_pb2.FinishReason.Name(figures.finish_reason)
    assert name == f"FINISH_REASON_{ended['finish_reason'].upper()}"
    counts = (figures.prompt_token_count, figures.completion_token_count)
    assert (*counts, figures.cached_token_count) == (3, 4, 2)
    assert figures.decode_duration.ToMilliseconds() == 2500
