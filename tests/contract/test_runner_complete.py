"""All that a request may ask for, over a real ring of three and on one rank: the same answers.

What each setting means is tested where it is computed; here, that it gets there and comes back.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from services.common.errors import Reason, ShardringError
from shardring.runner.v1 import instance_service_pb2 as pb
from shardring.runner.v1 import runner_pb2
from tests.contract.runner_lab import FACTS, Node, ask, place, refused, text, three_nodes

pytestmark = pytest.mark.asyncio(loop_scope="module")

SAMPLED = runner_pb2.Sampling(temperature=1.5, seed=11)
REQUESTS: list[dict[str, Any]] = [
    {"sampling": SAMPLED, "top_logprob_count": 3},
    {"sampling": runner_pb2.Sampling(repetition_penalty=1.5), "top_logprob_count": 0},
    {"sampling": runner_pb2.Sampling(frequency_penalty=1.5, presence_penalty=-1)},
    {"sampling": runner_pb2.Sampling(logit_bias={70: 8, 71: 7.5})},
    {"sampling": SAMPLED, "stop": runner_pb2.StopConditions(texts=["e", "st"], token_ids=[300])},
    {"sampling": SAMPLED, "stop": runner_pb2.StopConditions(ignore_end_tokens=True)},
    {"sampling": runner_pb2.Sampling(temperature=2, top_p=0.9, top_k=50, min_p=0.01, seed=3)},
    {"top_logprob_count": 20},
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def nodes() -> AsyncIterator[list[Node]]:
    async with three_nodes() as started:
        await asyncio.gather(
            started[0].ready("ring", place(started, [1, 5])),
            started[1].ready("alone", place([started[1]], [])),
        )
        yield started


def told(messages: list[pb.GenerateResponse]) -> tuple[Any, ...]:
    """Return what a choice brought, however it was cut into messages; without durations."""
    done = messages[-1].completion
    return (
        "".join(message.text for message in messages),
        [token for message in messages for token in message.token_ids],
        [str(one) for message in messages for one in message.logprobs],
        (done.finish_reason, done.completion_token_count, done.stop_text, done.stop_token_id),
    )


async def test_answers_are_the_same_on_any_ring_and_beside_any_other(nodes: list[Node]) -> None:
    async def alone(fields: dict[str, Any]) -> tuple[Any, ...]:
        prompt = text("Some words:")
        return told(await nodes[1].generate("alone", input=prompt, max_token_count=24, **fields))

    async def beside(fields: dict[str, Any]) -> tuple[Any, ...]:
        prompt = text("Some words:")
        return told(await nodes[0].generate("ring", input=prompt, max_token_count=24, **fields))

    expected = [await alone(fields) for fields in REQUESTS]
    assert await asyncio.gather(*(beside(fields) for fields in REQUESTS)) == expected
    # Else it would show nothing.
    assert len({str(answer[1]) for answer in expected}) >= len(REQUESTS) - 1
    for fields, (_, tokens, logprobs, _) in zip(REQUESTS, expected, strict=True):
        assert len(logprobs) == (len(tokens) if "top_logprob_count" in fields else 0)


async def test_the_likeliest_tokens_come_with_their_text(nodes: list[Node]) -> None:
    question, answer = FACTS[0]
    messages = await nodes[0].generate("ring", input=ask(question), top_logprob_count=2)
    logprobs = [one for message in messages for one in message.logprobs]
    assert "".join(one.chosen.text for one in logprobs) == answer
    assert all(one.chosen == one.top[0] and len(one.top) == 2 for one in logprobs)
    assert all(0 >= one.top[0].logprob > one.top[1].logprob for one in logprobs)


async def test_a_stop_text_is_not_sent_and_told(nodes: list[Node]) -> None:
    question, answer = FACTS[0]
    stop = runner_pb2.StopConditions(texts=["never comes", answer[5:9]])
    messages = await nodes[0].generate("ring", input=ask(question), stop=stop)
    assert "".join(message.text for message in messages) == answer[: answer.index(answer[5:9])]
    done = messages[-1].completion
    assert (done.finish_reason, done.stop_text) == (runner_pb2.FINISH_REASON_STOP, answer[5:9])


async def test_each_choice_is_what_its_seed_gives(nodes: list[Node]) -> None:
    together = await nodes[0].generate(
        "ring",
        input=text("Some words:"),
        sampling=SAMPLED,
        max_token_count=12,
        choice_count=3,
        top_logprob_count=0,
    )
    choices = [[m for m in together if m.choice_index == index] for index in range(3)]
    assert sum(map(len, choices)) == len(together)
    for index, messages in enumerate(choices):
        sampling = runner_pb2.Sampling(temperature=1.5, seed=SAMPLED.seed + index)
        single = await nodes[1].generate(
            "alone",
            input=text("Some words:"),
            sampling=sampling,
            max_token_count=12,
            top_logprob_count=0,
        )
        assert told(messages) == told(single)
        assert [m.HasField("completion") for m in messages].count(True) == 1


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("sampling.logit_bias", {"sampling": runner_pb2.Sampling(logit_bias={1024: 5})}),
        ("sampling.repetition_penalty", {"sampling": runner_pb2.Sampling(repetition_penalty=0)}),
        ("stop.texts[0]", {"stop": runner_pb2.StopConditions(texts=[""])}),
        ("top_logprob_count", {"top_logprob_count": 21}),
        ("choice_count", {"choice_count": 17}),
    ],
)
async def test_a_poisoned_request_fails_alone(
    nodes: list[Node], field: str, fields: dict[str, Any]
) -> None:
    question, answer = FACTS[1]
    fine = asyncio.create_task(nodes[0].answer("ring", question))
    with pytest.raises(ShardringError) as error:
        await nodes[0].generate("ring", input=text("x"), **fields)
    assert refused(error, Reason.INVALID_FIELD)["field"] == field
    assert await fine == answer
