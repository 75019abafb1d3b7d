"""`shardring rm`."""

import asyncio

import click

from services.cli.confirming import check_confirmable, confirm
from services.cli.names import names_of_nodes, resolve_nodes
from services.cli.shell import Shell, client_command
from services.cli.text import listed, size
from services.cli.together import nodes_option, together
from services.common.errors import Reason, ShardringError


@client_command
@click.argument("model")
@nodes_option("Only from this node. May be repeated.")
@click.option(
    "--yes", "-y", is_flag=True, help="Don't ask first. Needed where there's no terminal."
)
async def rm(shell: Shell, model: str, node_texts: tuple[str, ...], yes: bool) -> None:
    """Remove MODEL from the disk of every node that has any of it, or of those given.

    Says what each disk gained. A node that downloads or runs the model keeps it, and the command
    then exits with 1.
    """
    check_confirmable(shell, yes)
    found, topology = await asyncio.gather(shell.cluster.models(), shell.cluster.topology())
    names = names_of_nodes(topology.nodes)
    held = {
        fraction.node_id: fraction.downloaded_bytes
        for entry in found.models
        if entry.model_id == model
        for fraction in entry.fractions
    }
    node_ids = list(held)
    if node_texts:
        node_ids = [node.node_id for node in resolve_nodes(topology.nodes, node_texts)]
    node_ids.sort(key=names.label)
    if not node_ids:
        raise ShardringError(
            Reason.MODEL_NOT_FOUND,
            f"No node has anything of {model!r} on its disk. See: shardring models",
            metadata={"model_id": model},
        )
    if not yes:
        where = [f"{names.label(node_id)} ({size(held.get(node_id, 0))})" for node_id in node_ids]
        if not await confirm(shell, f"Remove {model} from {listed(where, 20)}?"):
            shell.remark("Nothing was removed.")
            raise click.exceptions.Exit(1)
    freed: dict[str, int] = {}
    refusals: dict[str, ShardringError] = {}

    async def remove(node_id: str) -> None:
        try:
            freed[node_id] = await shell.cluster.delete_model(node_id, model)
        except ShardringError as error:
            refusals[names.label(node_id)] = error

    await asyncio.gather(*map(remove, node_ids))
    if shell.json:
        nodes = [
            {"node_id": one, "freed_bytes": str(freed[one])} for one in node_ids if one in freed
        ]
        shell.print_document({"nodes": nodes})
    else:
        for node_id in node_ids:
            if node_id in freed:
                shell.out.print(f"{names.label(node_id)}: freed {size(freed[node_id])}")
    if refusals:
        raise together(refusals)
