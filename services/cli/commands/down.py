"""`shardring down`."""

import asyncio

import click

from services.cli.census import take_census
from services.cli.instances import stop_instance
from services.cli.render.instances import instance_state
from services.cli.shell import Shell, client_command
from services.common.errors import ShardringError
from shardring.runner.v1 import instance_service_pb2, runner_pb2


@client_command
@click.argument("instance_ids", metavar="INSTANCE...", nargs=-1, required=True)
async def down(shell: Shell, instance_ids: tuple[str, ...]) -> None:
    """Stop instances; wait until their memory is free. One that has ended already is no error."""
    census = await take_census(shell.cluster)
    outcomes = await asyncio.gather(
        *(stop_instance(shell.cluster, census, i) for i in dict.fromkeys(instance_ids)),
        return_exceptions=True,
    )
    stopped = [outcome for outcome in outcomes if isinstance(outcome, runner_pb2.Instance)]
    if shell.json:
        shell.print_document(instance_service_pb2.ListInstancesResponse(instances=stopped))
    else:
        for instance in stopped:
            shell.out.print(f"{instance.instance_id} is {instance_state(instance)}")
    failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    for failure in failures[1:]:
        shell.remark(failure.message if isinstance(failure, ShardringError) else repr(failure))
    if failures:
        raise failures[0]
