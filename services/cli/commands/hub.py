"""`shardring serve hub`."""

from pathlib import Path

import click

from services.common.addresses import parse_host_port
from services.common.logs import start_logging
from services.common.options import with_options
from services.common.security import ListenOptions, use_security
from services.common.server import run
from services.downloads.hub import serve_hub


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--listen",
    default="127.0.0.1:52490",
    envvar="SHARDRING_HUB_LISTEN",
    show_default=True,
    show_envvar=True,
    help="Address and port to serve on; port 0 takes any free one.",
)
@with_options(ListenOptions)
def hub(options: ListenOptions, folder: Path, listen: str) -> None:
    """Serve the models in FOLDER, laid out as ORGANISATION/NAME/files, read-only.

    Nodes use it in place of the public hub with HF_ENDPOINT=http://HOST:PORT.
    """
    start_logging("info")

    async def serve() -> None:
        use_security(options)
        await serve_hub(folder, parse_host_port(listen))

    run(serve)
