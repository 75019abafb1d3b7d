"""Requests that nobody should send: each fails alone or is answered, and those beside it go on."""

import asyncio
import math
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from services.common.errors import Reason, ShardringError
from shardring.runner.v1 import runner_pb2
from tests.contract.runner_lab import FACTS, Node, ask, children, place, text, three_nodes
from tests.fakes.files_on_disk import MODEL, FilesOnDisk

pytestmark = pytest.mark.asyncio(loop_scope="module")

# As any model's might, it refuses some messages, and breaks at others.
TEMPLATE = """
{%- if messages[0].content == "refuse" %}{{ raise_exception("no such words") }}{% endif %}
{%- if messages[0].content == "break" %}{{ messages[7].content.x.y }}{% endif %}
{%- if messages[0].content == "divide" %}{{ 1 // 0 }}{% endif %}
"""
LAST_TOKEN_ID = 2**31 - 1
VOCABULARY = 500


class PoisonedFiles(FilesOnDisk):
    """The model, with a template of another temper."""

    def __init__(self, folder: Path) -> None:
        for file in MODEL.iterdir():
            if file.name != "chat_template.jinja":
                (folder / file.name).symlink_to(file)
        template = (MODEL / "chat_template.jinja").read_text()
        (folder / "chat_template.jinja").write_text(TEMPLATE.strip() + template)
        super().__init__(folder)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def head(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Node]:
    """The head of "ring", of three ranks."""
    files = PoisonedFiles(tmp_path_factory.mktemp("model"))
    async with three_nodes(files) as nodes:
        await nodes[0].ready("ring", place(nodes, [2, 4]))
        yield nodes[0]


def ids(*token_ids: int) -> runner_pb2.GenerationInput:
    return runner_pb2.GenerationInput(token_ids=runner_pb2.TokenIds(ids=token_ids))


def sampling(**values: float) -> dict[str, object]:
    return {"input": text("Some words:"), "sampling": runner_pb2.Sampling(**values)}  # type: ignore[arg-type]


def bias(values: dict[int, float], **more: float) -> dict[str, object]:
    return {
        "input": text("Some words:"),
        "sampling": runner_pb2.Sampling(logit_bias=values, **more),  # type: ignore[arg-type]
    }


def stop(**values: object) -> dict[str, object]:
    conditions = runner_pb2.StopConditions(**values)  # type: ignore[arg-type]
    return {"input": text("Some words:"), "stop": conditions}


REFUSED: list[tuple[dict[str, object], Reason]] = [
    ({"input": ask("refuse")}, Reason.CHAT_TEMPLATE_FAILED),
    ({"input": ask("break")}, Reason.CHAT_TEMPLATE_FAILED),
    ({"input": ask("divide")}, Reason.CHAT_TEMPLATE_FAILED),
    ({"input": ids(LAST_TOKEN_ID)}, Reason.INVALID_FIELD),
    ({"input": ids(-1)}, Reason.INVALID_FIELD),
    ({"input": ids(-(2**31), 5)}, Reason.INVALID_FIELD),
    ({"input": ids(*[1] * 600)}, Reason.PROMPT_TOO_LONG),
    ({"input": text("a" * 300_000)}, Reason.PROMPT_TOO_LONG),
    (sampling(temperature=math.nan), Reason.INVALID_FIELD),
    (sampling(temperature=math.inf), Reason.INVALID_FIELD),
    (sampling(temperature=1, top_p=math.nan), Reason.INVALID_FIELD),
    (sampling(repetition_penalty=-math.inf), Reason.INVALID_FIELD),
    (sampling(seed=-1), Reason.INVALID_FIELD),
    (bias({LAST_TOKEN_ID: 1}), Reason.INVALID_FIELD),
    (bias({-1: 1}), Reason.INVALID_FIELD),
    (bias({5: math.nan}), Reason.INVALID_FIELD),
    (bias({5: 1e30}), Reason.INVALID_FIELD),
    (bias(dict.fromkeys(range(1025), 1.0)), Reason.INVALID_FIELD),
    (stop(texts=["x" * 1001]), Reason.INVALID_FIELD),
    (stop(texts=[""]), Reason.INVALID_FIELD),
    (stop(token_ids=[-1]), Reason.INVALID_FIELD),
    ({"input": text("hi"), "choice_count": 17}, Reason.INVALID_FIELD),
    ({"input": text("hi"), "top_logprob_count": 21}, Reason.INVALID_FIELD),
    ({"input": text("hi"), "max_token_count": -(2**31)}, Reason.INVALID_FIELD),
]

ANSWERED: list[dict[str, object]] = [
    {"input": ids(5)},
    {"input": ids(5), "max_token_count": 1, "choice_count": 16, "top_logprob_count": 20},
    {"input": text("Some words:"), "choice_count": 16, "top_logprob_count": 20},
    {"input": text("Some words:"), "max_token_count": LAST_TOKEN_ID // 300},
    {"input": text("\0\x01 \uffff \U0001f600 \u202e <|im_end|></s>")},
    {"input": ids(*[7] * 511)},
    sampling(temperature=1e-30, seed=1),
    sampling(temperature=1e-45, seed=1),
    sampling(temperature=10, seed=2**63 - 1) | {"choice_count": 3},
    sampling(temperature=10, top_p=1e-30),
    sampling(temperature=10, top_p=1e-30, top_k=1, min_p=1),
    sampling(temperature=1, top_k=1_000_000),
    sampling(temperature=1, min_p=1),
    sampling(repetition_penalty=1e-30),
    sampling(temperature=1, repetition_penalty=1e-45, seed=1),
    sampling(temperature=1e-30, repetition_penalty=10, frequency_penalty=2, presence_penalty=-2),
    bias(dict.fromkeys(range(VOCABULARY), -100.0), temperature=1),
    bias(dict.fromkeys(range(VOCABULARY), 100.0), temperature=1e-30),
    bias({5: 100.0, 6: -100.0}) | {"top_logprob_count": 20},
    stop(texts=[chr(65 + i) * 1000 for i in range(16)]),
    stop(texts=["\U0001f600" * 250, "\0"]),
    stop(token_ids=[LAST_TOKEN_ID, *range(63)]),
    stop(ignore_end_tokens=True),
]


async def test_each_fails_alone_or_is_answered(head: Node) -> None:
    pids = {rank: process.pid for rank, process in children("ring").items()}
    done = asyncio.Event()

    async def others() -> int:
        count = 0
        while not done.is_set() or not count:
            question, answer = FACTS[count % len(FACTS)]
            assert await head.answer("ring", question) == answer
            count += 1
        return count

    async def refuse(fields: dict[str, object], reason: Reason) -> None:
        with pytest.raises(ShardringError) as refusal:
            await head.generate("ring", **fields)
        assert refusal.value.reason is reason, fields

    async def answer(fields: dict[str, object]) -> None:
        messages = await head.generate("ring", **{"max_token_count": 40, **fields})
        ends = [m.completion for m in messages if m.HasField("completion")]
        assert len(ends) == fields.get("choice_count", 1), fields

    beside = [asyncio.create_task(others()) for _ in range(2)]
    # In three at a time, so that they meet in the same steps.
    work = [*(refuse(*case) for case in REFUSED), *map(answer, ANSWERED)]
    turns = asyncio.Semaphore(3)

    async def in_turn(one: object) -> None:
        async with turns:
            await one  # type: ignore[misc]

    try:
        await asyncio.gather(*map(in_turn, work))
    finally:
        done.set()
        counts = await asyncio.gather(*beside)
    assert all(counts)
    assert {rank: process.pid for rank, process in children("ring").items()} == pids
    assert (await head.get("ring")).request_count == 0
