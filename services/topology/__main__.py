"""`python -m services.topology`: runs the topology service."""

import click

from services.common.options import with_options
from services.common.server import run
from services.topology.bootstrap import TopologyOptions, serve


@click.command()
@with_options(TopologyOptions)
def main(options: TopologyOptions) -> None:
    """Track which nodes are alive and which verified links join them."""
    run(lambda: serve(options))


if __name__ == "__main__":
    main()
