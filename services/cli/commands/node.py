"""`shardring node`."""

import click

from services.cli.node import NodeOptions, run_node
from services.common.options import with_options
from services.common.server import run


@click.command()
@with_options(NodeOptions)
def node(options: NodeOptions) -> None:
    """Run this machine's node: its runner, its topology agent and its downloads worker."""
    run(lambda: run_node(options))
