"""Answers are printed one below the other, however they come."""

import io
from collections.abc import AsyncIterator, Sequence

import pytest
from rich.console import Console

from services.cli.answers import stream_answers
from services.cli.render.instances import completion_line
from services.cli.render.logprobs import logprobs_table
from services.cli.shell import make_console
from services.common.errors import Reason, ShardringError
from shardring.runner.v1 import instance_service_pb2, runner_pb2

Part = instance_service_pb2.GenerateResponse


async def stream(parts: Sequence[Part]) -> AsyncIterator[Part]:
    for part in parts:
        yield part


def text(index: int, said: str) -> Part:
    return Part(choice_index=index, text=said)


def end(index: int, said: str = "", tokens: int = 1) -> Part:
    completion = runner_pb2.Completion(completion_token_count=tokens)
    return Part(choice_index=index, text=said, completion=completion)


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("parts", "shown"),
    [
        ([text(0, "Par"), text(0, "is"), end(0, ".")], "Paris.\n"),
        ([text(0, "Paris\n"), end(0)], "Paris\n"),
        ([end(0)], ""),
    ],
)
async def test_one_answer_ends_with_a_line_end(parts: list[Part], shown: str) -> None:
    console = make_console(io.StringIO())
    (answered,) = await stream_answers(stream(parts), console)
    assert written(console) == shown
    assert answered.completion.completion_token_count == 1


async def test_several_answers_do_not_mix() -> None:
    console = make_console(io.StringIO())
    parts = [text(2, "c"), text(0, "a"), text(1, "b"), end(2, "C", 3), text(0, "A"), end(0, "", 1)]
    parts += [text(1, "B"), end(1, "", 2)]
    answers = await stream_answers(stream(parts), console, 3)
    assert written(console) == "[1 of 3]\naA\n[2 of 3]\nbB\n[3 of 3]\ncC\n"
    assert [answered.completion.completion_token_count for answered in answers] == [1, 2, 3]


async def test_what_came_before_a_fault_is_shown() -> None:
    console = make_console(io.StringIO())

    async def broken() -> AsyncIterator[Part]:
        yield text(0, "Par")
        raise ShardringError(Reason.INSTANCE_FAILED, "gone")

    with pytest.raises(ShardringError, match="gone"):
        await stream_answers(broken(), console)
    assert written(console) == "Par\n"


@pytest.mark.parametrize("parts", [[text(0, "a")], [end(0), end(2)], [end(1)]])
async def test_a_node_that_sends_other_answers_is_found_out(parts: list[Part]) -> None:
    with pytest.raises(ShardringError) as fault:
        await stream_answers(stream(parts), make_console(io.StringIO()), 2)
    assert fault.value.reason is Reason.INTERNAL


def test_figures_tell_of_kept_tokens_and_of_the_stop_text() -> None:
    completion = runner_pb2.Completion(
        finish_reason=runner_pb2.FINISH_REASON_STOP,
        completion_token_count=4,
        prompt_token_count=9,
        cached_token_count=8,
        stop_text="\n\x9b",
    )
    line = completion_line(completion)
    assert line.endswith('prompt of 9 tokens (8 kept from before), stopped before "\\n"')
    completion.stop_token_id = 5
    assert line.startswith(completion_line(completion))


def test_log_probabilities_are_readable() -> None:
    space = runner_pb2.TokenLogprob(token_id=1, text=" \n\x1b", logprob=-0.6931472)
    never = runner_pb2.TokenLogprob(token_id=2, text="é", logprob=-9999)
    console = make_console(io.StringIO())
    console.print(
        logprobs_table(
            [
                runner_pb2.ChosenLogprob(chosen=space, top=[space, never]),
                runner_pb2.ChosenLogprob(chosen=never),
            ]
        )
    )
    rows = [line.split() for line in written(console).splitlines()]
    assert rows == [
        ["TOKEN", "LOGPROB", "CHANCE", "LIKELIEST"],
        ['"', '\\n\\u001b"', "-0.693", "50.0", "%", '"', '\\n\\u001b"', "50.0", "%,"]
        + ['"é"', "0.0", "%"],
        ['"é"', "-9999.000", "0.0", "%"],
    ]
    console = make_console(io.StringIO())
    console.print(logprobs_table([runner_pb2.ChosenLogprob(chosen=never)]))
    assert "LIKELIEST" not in written(console)
