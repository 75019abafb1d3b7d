"""`shardring nodes`."""

import time

import click
from rich.console import RenderableType

from services.cli.render.nodes import nodes_table
from services.cli.shell import Shell, client_command
from services.cli.watching import watch
from shardring.topology.v1 import topology_pb2


@client_command
@click.option("--watch", "watching", is_flag=True, help="Show every change until Ctrl-C.")
async def nodes(shell: Shell, watching: bool) -> None:
    """Show the machines of the cluster: names, ids, addresses, memory, and when last heard of.

    Other commands take a node by its name, its id, or the beginning of its id.
    """
    if watching:
        await watch(shell, _document, _shown)
        return
    topology = await shell.cluster.topology()
    if shell.json:
        shell.print_document(_document(topology))
        return
    shell.out.print(_shown(topology))
    for conflict in topology.identity_conflicts:
        shell.remark(
            f"{conflict.claimed_by} is refused: it has the node id of {conflict.held_by}. "
            "See: shardring doctor"
        )
    if topology.gathering:
        shell.remark("Topology has just started; nodes may still be missing.")
    elif not topology.nodes:
        shell.remark("No node is alive. Start one with: shardring node")


def _document(topology: topology_pb2.Topology) -> topology_pb2.Topology:
    return topology_pb2.Topology(
        nodes=topology.nodes,
        identity_conflicts=topology.identity_conflicts,
        gathering=topology.gathering,
    )


def _shown(topology: topology_pb2.Topology) -> RenderableType:
    return nodes_table(topology.nodes, now=time.time())
