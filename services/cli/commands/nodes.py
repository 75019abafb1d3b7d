"""`shardring nodes`."""

import time

from services.cli.render.nodes import nodes_table
from services.cli.shell import Shell, client_command
from shardring.topology.v1 import topology_pb2


@client_command
async def nodes(shell: Shell) -> None:
    """Show the machines of the cluster: names, ids, addresses, memory, and when last heard of.

    Other commands take a node by its name, its id, or the beginning of its id.
    """
    topology = await shell.cluster.topology()
    if shell.json:
        shell.print_document(
            topology_pb2.Topology(nodes=topology.nodes, gathering=topology.gathering)
        )
        return
    shell.out.print(nodes_table(topology.nodes, now=time.time()))
    if topology.gathering:
        shell.remark("Topology has just started; nodes may still be missing.")
    elif not topology.nodes:
        shell.remark("No node is alive. Start one with: shardring node")
