"""`shardring generate`."""

from typing import Any

import click

from services.cli.asking import Question, ask, asking_options
from services.cli.census import take_census
from services.cli.shell import Shell, client_command


@client_command
@click.argument("instance_id", metavar="INSTANCE")
@click.argument("prompt")
@asking_options
async def generate(shell: Shell, instance_id: str, prompt: str, **asking: Any) -> None:
    """Answer PROMPT on INSTANCE, as `shardring ps` shows it.

    The answer goes to standard output, its figures to standard error. Ctrl-C ends it.
    """
    question = Question(prompt, **asking)
    instance = (await take_census(shell.cluster)).find(instance_id)
    head = shell.cluster.head(instance.placement)
    await ask(shell, head, instance, question)
