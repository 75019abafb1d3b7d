"""Wires the downloads service together and runs it."""

from dataclasses import dataclass

from services.common.addresses import HostPort, parse_host_port
from services.common.logs import start_logging
from services.common.options import option
from services.common.security import ServerOptions, use_security
from services.common.server import announce, check_listen, start_server, until_stopped
from services.common.telemetry import start_telemetry
from services.downloads.app import Downloads
from services.downloads.fleet import Fleet
from services.downloads.rpc import registration
from services.downloads.rpc.servicer import DownloadsServicer
from services.downloads.watchers import Watchers


@dataclass(frozen=True)
class DownloadsOptions(ServerOptions):
    """How the downloads service runs."""

    listen: str = option(
        "127.0.0.1:52412",
        "Address and port to serve on; port 0 takes a free one.",
        env="SHARDRING_DOWNLOADS_LISTEN",
    )
    log_level: str = option(
        "info",
        "Least important messages to log.",
        env="SHARDRING_LOG_LEVEL",
        choices=("debug", "info", "warning", "error"),
    )


async def serve(options: DownloadsOptions) -> None:
    """Serve until the process is told to stop. It needs nothing but workers that attach."""
    start_logging(options.log_level)
    security = use_security(options)
    listen = parse_host_port(options.listen)
    check_listen(listen, security)
    telemetry = start_telemetry("shardring-downloads")
    watchers = Watchers()
    fleet = Fleet(watchers)
    servicer = DownloadsServicer(Downloads(fleet, watchers), fleet)
    server = await start_server(listen, [registration(servicer)])
    try:
        announce("downloads", HostPort(listen.host, server.port))
        await server.set_serving(True)
        await until_stopped()
    finally:
        servicer.end_sessions()
        watchers.close()
        await server.stop()
        fleet.close()
        telemetry.shutdown()
