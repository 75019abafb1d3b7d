"""`shardring up`."""

from typing import Any

import click

from services.cli.census import ended, take_census
from services.cli.instances import bring_up
from services.cli.names import new_instance_id
from services.cli.placing import cache_options, placing_options, wanted_placement
from services.cli.render.instances import instance_state, where
from services.cli.shell import Shell, client_command, follower
from services.common.errors import Reason, ShardringError


@client_command
@click.argument("model")
@placing_options
@cache_options
@click.option("--name", default="", help="The instance's id.  [default: the model's and 4 digits]")
async def up(shell: Shell, model: str, name: str, **placing: Any) -> None:
    """Place MODEL ("organisation/name") on a ring of nodes and start it; wait until it is READY.

    Nodes fetch what they lack. Ctrl-C stops the instance again.
    """
    wanted = await wanted_placement(shell.cluster, model, **placing)
    if name:
        await _check_free(shell, name)
    instance = await bring_up(
        shell.cluster, wanted, name or new_instance_id(model), follower(shell), shell.remark
    )
    if not shell.json:
        shell.out.print(f"{instance.instance_id} is READY on {where(instance)}")


async def _check_free(shell: Shell, name: str) -> None:
    """Refuse the id of an instance that lives: it must neither be joined nor stopped by this."""
    for instance in (await take_census(shell.cluster)).instances:
        if instance.instance_id == name and not ended(instance):
            raise ShardringError(
                Reason.INSTANCE_EXISTS,
                f"An instance {name} is {instance_state(instance)} on {where(instance)}; "
                "stop it or choose another name.",
                metadata={"instance_id": name},
            )
