"""Asking an instance: the options of a generation, and showing the answer."""

import re
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import click

from services.cli.answers import stream_answers
from services.cli.render.instances import completion_line
from services.cli.render.logprobs import logprobs_table
from services.cli.runner_client import RunnerClient
from services.cli.shell import INT32, INT64, Shell
from services.common.errors import invalid_field
from shardring.runner.v1 import instance_service_pb2, runner_pb2

_MAX_TOKEN_ID = 2**31 - 1
_BIAS = re.compile(r"([0-9]{1,10})=([+-]?[0-9]{1,9}(?:\.[0-9]{0,9})?)")

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
    click.option(
        "--stop", multiple=True, metavar="TEXT", help="Stop before this text. May be repeated."
    ),
    click.option(
        "--repetition-penalty",
        type=float,
        help="Above 1, tokens among the last 20 become less likely; below, more.",
    ),
    click.option(
        "--frequency-penalty",
        type=float,
        default=0.0,
        help="Less of a token for each time it is among the last 20.",
    ),
    click.option(
        "--presence-penalty",
        type=float,
        default=0.0,
        help="Less of a token once it is among the last 20.",
    ),
    click.option(
        "--logit-bias",
        multiple=True,
        metavar="ID=VALUE",
        help="Make a token likelier, or with -100 impossible. May be repeated.",
    ),
    click.option(
        "--logprobs",
        type=INT32,
        metavar="N",
        help="Show how likely each token was, and the N likeliest in its place.",
    ),
    click.option("--choices", type=INT32, default=1, help="Give so many answers."),
)


@dataclass(frozen=True)
class Question:
    """A prompt and how it is to be answered; fields as the options of `asking_options`.

    Raises INVALID_FIELD for a system text beside `raw`, where it has nowhere to go, for a bias
    that is none, and for no answers at all.
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
    stop: tuple[str, ...] = ()
    repetition_penalty: float | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[str, ...] = ()
    logprobs: int | None = None
    choices: int = 1

    def __post_init__(self) -> None:
        if self.raw and self.system:
            raise invalid_field("system", self.system, "none beside --raw")
        if self.choices < 1:
            # On the wire 0 means 1.
            raise invalid_field("choices", self.choices, "1 or more")
        self.biases()

    def biases(self) -> dict[int, float]:
        """Return what is added to the logits of which token ids."""
        return dict(_bias(text) for text in self.logit_bias)


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
            repetition_penalty=question.repetition_penalty,
            frequency_penalty=question.frequency_penalty,
            presence_penalty=question.presence_penalty,
            logit_bias=question.biases(),
        ),
        max_token_count=question.max_tokens,
        stop=runner_pb2.StopConditions(texts=question.stop),
        top_logprob_count=question.logprobs,
        choice_count=question.choices,
    )


async def ask(
    shell: Shell, head: RunnerClient, instance: runner_pb2.Instance, question: Question
) -> None:
    """Stream the answers to standard output, and their figures to standard error."""
    async with aclosing(head.generate(generate_request(instance, question))) as parts:
        if shell.json:
            async for part in parts:
                shell.print_line(part)
            return
        answers = await stream_answers(parts, shell.out, question.choices)
    for number, answered in enumerate(answers, 1):
        if answered.logprobs:
            shell.err.print(logprobs_table(answered.logprobs))
        count = f"{number} of {question.choices}: " if question.choices > 1 else ""
        shell.err.print(count + completion_line(answered.completion), style="dim")


def _bias(text: str) -> tuple[int, float]:
    """Return a token id and its bias from "ID=VALUE". Raises INVALID_FIELD."""
    found = _BIAS.fullmatch(text)
    if found is None or int(found[1]) > _MAX_TOKEN_ID:
        raise invalid_field("logit_bias", text, "ID=VALUE, such as 42=-100")
    return int(found[1]), float(found[2])
