"""`shardring preview`."""

from typing import Any

import click

from services.cli.placing import placing_options, wanted_placement
from services.cli.render.placements import previews
from services.cli.shell import Shell, client_command
from shardring.placement.v1 import placement_service_pb2


@client_command
@click.argument("model")
@placing_options
@click.option("--hosts", is_flag=True, help="Also show each rank's MLX host list.")
async def preview(shell: Shell, model: str, hosts: bool, **placing: Any) -> None:
    """Show how MODEL ("organisation/name") could be placed now, by ring size, or why not.

    Nodes stand in rank order with the layers they would take and what these need of the memory
    that is available.
    """
    wanted = await wanted_placement(shell.cluster, model, **placing)
    response = await shell.cluster.preview_placements(
        placement_service_pb2.PreviewPlacementsRequest(
            model_id=wanted.model_id, revision=wanted.revision, constraints=wanted.constraints
        )
    )
    if shell.json:
        shell.print_document(response)
        return
    shell.out.print(previews(response, hosts=hosts))
