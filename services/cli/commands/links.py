"""`shardring links`."""

import click
from rich.console import Group, RenderableType

from services.cli.render.nodes import MATRIX_NODES, links_matrix, links_table
from services.cli.shell import Shell, client_command
from services.cli.text import count
from services.cli.watching import watch
from shardring.topology.v1 import topology_pb2


@client_command
@click.option("--watch", "watching", is_flag=True, help="Show every change until Ctrl-C.")
async def links(shell: Shell, watching: bool) -> None:
    """Show the verified links between nodes: who reaches whom, where, and how fast.

    A ring needs its neighbours linked both ways; pairs that lack one are marked one-way. Below, a
    matrix shows the fastest link from each node (row) to each other one (column): its speed, or
    its round trip while that is not measured.
    """
    if watching:
        await watch(shell, _document, _shown)
        return
    topology = await shell.cluster.topology()
    if shell.json:
        shell.print_document(_document(topology))
        return
    shell.out.print(_shown(topology))
    if len(topology.nodes) > MATRIX_NODES:
        shell.remark(f"The matrix is left out: it has room for {count(MATRIX_NODES, 'node')}.")
    if topology.gathering:
        shell.remark("Topology has just started; links may still be missing.")


def _document(topology: topology_pb2.Topology) -> topology_pb2.Topology:
    return topology_pb2.Topology(
        links=topology.links,
        misdirections=topology.misdirections,
        gathering=topology.gathering,
    )


def _shown(topology: topology_pb2.Topology) -> RenderableType:
    if not 2 <= len(topology.nodes) <= MATRIX_NODES:
        return links_table(topology)
    return Group(links_table(topology), "", links_matrix(topology))
