"""`shardring links`."""

from services.cli.render.nodes import links_table
from services.cli.shell import Shell, client_command
from shardring.topology.v1 import topology_pb2


@client_command
async def links(shell: Shell) -> None:
    """Show the verified links between nodes: who reaches whom, where, and how fast.

    A ring needs its neighbours linked both ways; pairs that lack one are marked one-way.
    """
    topology = await shell.cluster.topology()
    if shell.json:
        shell.print_document(
            topology_pb2.Topology(links=topology.links, gathering=topology.gathering)
        )
        return
    shell.out.print(links_table(topology))
    if topology.gathering:
        shell.remark("Topology has just started; links may still be missing.")
