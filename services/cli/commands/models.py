"""`shardring models`."""

import asyncio

from services.cli.names import names_of_nodes
from services.cli.render.downloads import models_table
from services.cli.shell import Shell, client_command
from shardring.downloads.v1 import downloads_service_pb2


@client_command
async def models(shell: Shell) -> None:
    """Show which models are on which nodes' disks, in whole or in part."""
    found, topology = await asyncio.gather(shell.cluster.models(), shell.cluster.topology())
    if shell.json:
        shell.print_document(downloads_service_pb2.ListModelsResponse(models=found))
        return
    # A worker may be attached before, or longer than, topology knows its node.
    node_ids = {node.node_id for node in topology.nodes}
    node_ids |= {fraction.node_id for entry in found for fraction in entry.fractions}
    shell.out.print(models_table(found, sorted(node_ids), names_of_nodes(topology.nodes)))
    if not found:
        shell.remark("No model is on any node's disk. Fetch one with: shardring download MODEL")
