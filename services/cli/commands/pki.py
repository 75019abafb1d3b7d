"""`shardring pki`: a cluster's certificate authority and what it issues."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from cryptography import x509

from services.cli.pki import (
    CA_CERT,
    CA_DAYS,
    DAYS,
    Wish,
    create_authority,
    issue_certificate,
    read_authority,
    readable,
)
from services.common.server import StartError
from services.topology.agent.identity import held_identity, known_node_id

_FOLDER = "~/.shardring/pki"
_PATH = click.Path(path_type=Path)


def _folder(help: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return click.option("--folder", type=_PATH, default=_FOLDER, show_default=True, help=help)


_replace = click.option("--replace", is_flag=True, help="Write over what is there.")


@click.command()
@_folder("Where to keep it.")
@click.option("--name", default="shardring", show_default=True, help="Name of the cluster.")
@click.option(
    "--days", type=int, default=CA_DAYS, show_default=True, help="How long it is to be valid."
)
@_replace
def init(folder: Path, name: str, days: int, replace: bool) -> None:
    """Make a cluster's certificate authority.

    Whoever has its key can be every node and every client: keep the folder where nobody else reads
    it, best on a machine that is not part of the cluster.
    """
    cert, key = create_authority(folder.expanduser().resolve(), f"{name}-ca", days, replace=replace)
    _made(cert, key)
    click.echo(
        f"\nGive {cert} to every process as --tls-ca; keep {key.name} here, and secret. Next, a "
        "certificate for the\nmachine with the services, for each node and for each person:\n\n"
        "  shardring pki issue studio-1 --host 10.0.0.5\n"
        "  shardring pki issue --node ID     # as shardring pki node-id says on that machine\n"
        "  shardring pki issue anna --client"
    )


@click.command()
@click.argument("name", default="")
@_folder(f"Folder of the authority ({CA_CERT} and its key).")
@click.option(
    "--host",
    "hosts",
    multiple=True,
    help="Name or address at which it is dialled; loopback is always among them.",
)
@click.option("--node", default="", metavar="ID", help="The certificate is of the node of this id.")
@click.option("--client", is_flag=True, help="For a person or program that only calls.")
@click.option(
    "--days", type=int, default=DAYS, show_default=True, help="How long it is to be valid."
)
@click.option("--out", type=_PATH, help="Folder to write to; else the authority's.")
@_replace
def issue(
    name: str,
    folder: Path,
    hosts: tuple[str, ...],
    node: str,
    client: bool,
    days: int,
    out: Path | None,
    replace: bool,
) -> None:
    """Make the certificate NAME.crt and its key NAME.key.

    For a machine with services (--host), a node (--node ID, then NAME may be left out) or a client
    (--client).
    """
    if not name and not node:
        raise click.UsageError("Name the certificate, or give --node ID.")
    authority_folder = folder.expanduser().resolve()
    wish = Wish(name or f"node-{node[:12]}", hosts, node, client, days)
    cert, key = issue_certificate(
        read_authority(authority_folder),
        wish,
        authority_folder if out is None else out.expanduser().resolve(),
        replace=replace,
    )
    _made(cert, key)
    click.echo(
        "\nBring both and the authority's certificate to its machine, and name them there:\n\n"
        f"  export SHARDRING_TLS_CERT={cert}\n"
        f"  export SHARDRING_TLS_KEY={key}\n"
        f"  export SHARDRING_TLS_CA={authority_folder / CA_CERT}"
    )


@click.command()
@click.option(
    "--data-dir",
    type=_PATH,
    default="~/.shardring",
    envvar="SHARDRING_DATA_DIR",
    show_default=True,
    show_envvar=True,
    help="Folder that keeps the node's identity.",
)
def node_id(data_dir: Path) -> None:
    """Say which id this machine's node has; make it where there is none."""
    folder = data_dir.expanduser()
    known = known_node_id(folder)
    try:
        if known is None:
            with held_identity(folder) as identity:
                known = identity.node_id
    except StartError as error:
        raise click.ClickException(str(error)) from error
    click.echo(known)


def _made(cert: Path, key: Path) -> None:
    certificate = x509.load_pem_x509_certificate(cert.read_bytes())
    click.echo(f"{cert}   {readable(certificate)}")
    click.echo(f"{key}   its private key, for its owner's eyes only")
