"""Asking an instance: the options of a generation, and showing the answer."""

from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import click

from services.cli.follow import stream_generation
from services.cli.render.instances import completion_line
from services.cli.runner_client import RunnerClient
from services.cli.shell import INT32, INT64, Shell
from services.common.errors import invalid_field
from shardring.runner.v1 import instance_service_pb2, runner_pb2

_OPTIONS = (
    click.option("--system", default="", help="What the model is told about its part."),
    click.option("--raw", is_flag=True, help="Take the prompt as it is, without chat template."),
    click.option("--temperature", type=float, default=0.0, help="0 takes the likeliest token."),
    click.option("--top-p", type=float, help="Keep the likeliest that reach this probability."),
    click.option("--top-k", type=INT32, default=0, help="Keep so many."),
    click.option("--min-p", type=float, default=0.0, help="Keep those so likely as the best."),
    click.option("--seed", type=INT64, help="Repeats a sampled answer."),
    click.option(
        "--max-tokens",
        type=INT32,
        default=0,
        help="Stop after so many; 0: at the end of the context.",
    ),
)


@dataclass(frozen=True)
class Question:
    """A prompt and how it is to be answered; fields as the options of `asking_options`.

    Raises INVALID_FIELD for a system text beside `raw`, where it has nowhere to go.
    """

    prompt: str
    system: str
    raw: bool
    temperature: float
    top_p: float | None
    top_k: int
    min_p: float
    seed: int | None
    max_tokens: int

    def __post_init__(self) -> None:
        if self.raw and self.system:
            raise invalid_field("system", self.system, "none beside --raw")


def asking_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options that become a Question's fields."""
    for add in reversed(_OPTIONS):
        command = add(command)
    return command


def generate_request(
    instance: runner_pb2.Instance, question: Question
) -> instance_service_pb2.GenerateRequest:
    """Return the call: as chat when the model has a template for it, unless `raw`.

    Raises INVALID_FIELD for a system text where there is no template to put it in.
    """
    given = runner_pb2.GenerationInput(prompt=question.prompt)
    if instance.has_chat_template and not question.raw:
        turns = [runner_pb2.ChatMessage(role="user", content=question.prompt)]
        if question.system:
            turns.insert(0, runner_pb2.ChatMessage(role="system", content=question.system))
        given = runner_pb2.GenerationInput(messages=runner_pb2.ChatMessages(messages=turns))
    elif question.system:
        raise invalid_field("system", question.system, "none for a model without chat template")
    return instance_service_pb2.GenerateRequest(
        instance_id=instance.instance_id,
        input=given,
        sampling=runner_pb2.Sampling(
            temperature=question.temperature,
            top_p=question.top_p,
            top_k=question.top_k,
            min_p=question.min_p,
            seed=question.seed,
        ),
        max_token_count=question.max_tokens,
    )


async def ask(
    shell: Shell, head: RunnerClient, instance: runner_pb2.Instance, question: Question
) -> None:
    """Stream the answer to standard output, and its figures to standard error."""
    async with aclosing(head.generate(generate_request(instance, question))) as parts:
        if shell.json:
            async for part in parts:
                shell.print_line(part)
            return
        completion = await stream_generation(parts, shell.out)
    shell.err.print(completion_line(completion), style="dim")
