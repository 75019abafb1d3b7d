"""Runs the downloads service: `python -m services.downloads --help`."""

import click

from services.common.options import with_options
from services.common.server import run
from services.downloads.bootstrap import DownloadsOptions, serve


@click.command()
@with_options(DownloadsOptions)
def main(options: DownloadsOptions) -> None:
    """Serve downloads: what is on which node's disk, and fetching what is needed."""
    run(lambda: serve(options))


if __name__ == "__main__":
    main()
