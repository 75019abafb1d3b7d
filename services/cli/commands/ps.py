"""`shardring ps`."""

import time

from services.cli.census import take_census
from services.cli.render.instances import instances_table
from services.cli.shell import Shell, as_dict, client_command


@client_command
async def ps(shell: Shell) -> None:
    """Show the instances of all nodes: where they run, how they are, and why one failed.

    Ended ones stay listed for an hour.
    """
    census = await take_census(shell.cluster)
    if shell.json:
        shell.print_document(
            {
                "instances": [as_dict(instance) for instance in census.instances],
                "unreachable_nodes": sorted(census.unreachable),
            }
        )
        return
    table = instances_table(census.instances, now=time.time())
    if shell.out.measure(table).maximum > shell.out.width:
        table = instances_table(census.instances, now=time.time(), stacked=True)
    shell.out.print(table)
    for label, error in sorted(census.unreachable.items()):
        shell.remark(f"Node {label} was not asked: {error.message}")
