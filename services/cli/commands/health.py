"""`shardring health`.

Containers ask it every few seconds: it imports little.
"""

import http.client
import urllib.error
import urllib.request
from collections.abc import Callable

import click

from services.common.options import with_options
from services.common.security import TlsOptions

# grpc.health.v1.HealthCheckResponse, as bytes: its one field, the state, and state SERVING.
_SERVING = b"\x08\x01"


@click.command()
@click.argument("address", default="127.0.0.1:52420")
@click.option(
    "--seconds",
    type=click.FloatRange(0.1, 600),
    default=5.0,
    show_default=True,
    help="How long to wait for the answer.",
)
@with_options(TlsOptions)
def health(options: TlsOptions, address: str, seconds: float) -> None:
    """Ask the process at ADDRESS whether it serves: HOST:PORT of a service or node, or a URL.

    Ends with 0 when it does, else with 1 and why not. HOST:PORT is asked by grpc.health.v1; a URL,
    such as http://127.0.0.1:52470/liveness of a gateway, has to answer with no server's error.
    """
    if address.startswith(("http://", "https://")):
        why = _asked_by_http(address, seconds)
    else:
        why = _asked_by_grpc(address, seconds, options)
    if why:
        raise click.ClickException(f"{address} does not serve: {why}")
    click.echo(f"{address} serves")


def _asked_by_http(url: str, seconds: float) -> str:
    """Return why a URL does not answer, or with 5xx; "" when it answers."""
    try:
        # Never through a proxy: what it answers says nothing.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(url, timeout=seconds):
            return ""
    except urllib.error.HTTPError as error:
        return str(error) if error.code >= http.client.INTERNAL_SERVER_ERROR else ""
    except urllib.error.URLError as error:
        return str(error.reason)
    except (OSError, http.client.HTTPException, ValueError) as error:
        return str(error) or type(error).__name__


def _asked_by_grpc(address: str, seconds: float, options: TlsOptions) -> str:
    """Return why a gRPC server does not say SERVING, "" when it does."""
    import grpc

    from services.common.addresses import parse_host_port
    from services.common.security import security_of

    target = str(parse_host_port(address))
    tls = security_of(options).tls
    settings = [("grpc.enable_http_proxy", 0)]
    channel = (
        grpc.insecure_channel(target, settings)
        if tls is None
        else grpc.secure_channel(target, tls.channel_credentials(), settings)
    )
    with channel:
        check: Callable[..., bytes] = channel.unary_unary("/grpc.health.v1.Health/Check")
        try:
            answer = check(b"", timeout=seconds, wait_for_ready=False)
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
    return "" if answer == _SERVING else "it says NOT_SERVING"
