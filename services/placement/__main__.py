"""`python -m services.placement`: serve placement."""

import click

from services.common.options import with_options
from services.common.server import run
from services.placement.bootstrap import PlacementOptions, serve


@click.command()
@with_options(PlacementOptions)
def main(options: PlacementOptions) -> None:
    """Serve placement: which ring of nodes runs a model."""
    run(lambda: serve(options))


if __name__ == "__main__":
    main()
