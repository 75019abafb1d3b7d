"""`shardring preview`."""

from typing import Any, TextIO

import click

from services.cli.placing import placing_options, wanted_placement
from services.cli.render.dot import drawn
from services.cli.render.placements import previews, taken_placement
from services.cli.shell import Shell, client_command
from shardring.common.v1 import common_pb2
from shardring.placement.v1 import placement_service_pb2

_SHARDINGS = {
    "pipeline": common_pb2.SHARDING_PIPELINE,
    "tensor": common_pb2.SHARDING_TENSOR,
    "all": common_pb2.SHARDING_UNSPECIFIED,
}
_BACKENDS = {
    "ring": common_pb2.RING_BACKEND_MLX_RING,
    "jaccl": common_pb2.RING_BACKEND_JACCL,
    "all": common_pb2.RING_BACKEND_UNSPECIFIED,
}


@client_command
@click.argument("model")
@placing_options
@click.option(
    "--sharding",
    type=click.Choice(["pipeline", "tensor", "all"]),
    default="pipeline",
    show_default=True,
    help="How to cut the model: into stages of layers, or each layer into equal parts.",
)
@click.option(
    "--backend",
    type=click.Choice(["ring", "jaccl", "all"]),
    default="ring",
    show_default=True,
    help="What carries messages: MLX's ring over TCP, or JACCL over RDMA.",
)
@click.option("--hosts", is_flag=True, help="Also show each rank's MLX host list.")
@click.option(
    "--dot",
    type=click.File("w"),
    help="Write the topology with the ring drawn in, for Graphviz, to this file; - for the screen.",
)
async def preview(
    shell: Shell,
    model: str,
    sharding: str,
    backend: str,
    hosts: bool,
    dot: TextIO | None,
    **placing: Any,
) -> None:
    """Show how MODEL ("organisation/name") could be placed now, by ring size, or why not.

    Nodes stand in rank order with the layers they would take and what these need of the memory
    that is available.
    """
    wanted = await wanted_placement(shell.cluster, model, **placing)
    response = await shell.cluster.preview_placements(
        placement_service_pb2.PreviewPlacementsRequest(
            model_id=wanted.model_id,
            revision=wanted.revision,
            constraints=wanted.constraints,
            sharding=_SHARDINGS[sharding],
            ring_backend=_BACKENDS[backend],
            objective=wanted.objective,
        )
    )
    if dot is not None:
        dot.write(
            drawn(await shell.cluster.topology(), taken_placement(response, wanted.objective))
        )
        return
    if shell.json:
        shell.print_document(response)
        return
    shell.out.print(previews(response, wanted.objective, hosts=hosts))
