"""`shardring run`."""

from dataclasses import fields
from typing import Any

import click

from services.cli.asking import Question, ask, asking_options
from services.cli.census import take_census
from services.cli.instances import Wanted, bring_up, clean_up, ready_instances
from services.cli.names import new_instance_id
from services.cli.placing import cache_options, placing_options, wanted_placement
from services.cli.render.instances import where
from services.cli.shell import Shell, client_command, follower
from shardring.runner.v1 import runner_pb2


@client_command
@click.argument("model")
@click.argument("prompt")
@placing_options
@cache_options
@asking_options
@click.option("--keep", is_flag=True, help="Leave the instance running.")
async def run(
    shell: Shell,
    model: str,
    prompt: str,
    keep: bool,
    **options: Any,
) -> None:
    """Answer PROMPT with MODEL ("organisation/name"), whatever that takes.

    Uses a READY instance of the model that fulfils the options; else places, fetches and starts
    one, and stops it afterwards unless told to --keep it. The answer goes to standard output,
    all else to standard error.
    """
    asking = options.keys() & {field.name for field in fields(Question)}
    question = Question(prompt, **{name: options.pop(name) for name in asking})
    wanted = await wanted_placement(shell.cluster, model, **options)
    found = await _ready(shell, wanted)
    if found is not None:
        await ask(shell, shell.cluster.head(found.placement), found, question)
        return
    instance = await bring_up(
        shell.cluster, wanted, new_instance_id(model), follower(shell), shell.remark
    )
    head = shell.cluster.head(instance.placement)
    try:
        if keep and not shell.json:
            shell.err.print(f"{instance.instance_id} is READY on {where(instance)}", style="dim")
        await ask(shell, head, instance, question)
    finally:
        if not keep:
            await clean_up(head, instance.instance_id, shell.remark)


async def _ready(shell: Shell, wanted: Wanted) -> runner_pb2.Instance | None:
    """Return a READY instance that will do. One of another commit does only if none was named."""
    census = await take_census(shell.cluster)
    if not (ready := ready_instances(census, wanted, "")) or not wanted.revision:
        return next(iter(ready), None)
    commit = (await shell.cluster.model(wanted.model_id, wanted.revision)).commit
    return next(iter(ready_instances(census, wanted, commit)), None)
