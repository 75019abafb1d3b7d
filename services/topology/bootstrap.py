"""Builds and runs the topology service."""

import asyncio
import contextlib
from dataclasses import dataclass

from services.common.addresses import HostPort, parse_host_port
from services.common.errors import invalid_field
from services.common.logs import start_logging
from services.common.options import option
from services.common.server import announce, start_server, until_stopped
from services.common.telemetry import start_telemetry
from services.topology.app import TopologyApp
from services.topology.rpc.servicer import topology_registration


@dataclass(frozen=True)
class TopologyOptions:
    """How the topology service runs."""

    listen: str = option(
        "127.0.0.1:52410",
        "Address and port to serve on; port 0 takes any free one.",
        env="SHARDRING_TOPOLOGY_LISTEN",
    )
    heartbeat_seconds: float = option(
        3.0, "How often nodes report, 0.1 to 60; after 3 missed reports a node counts as gone."
    )
    lab: bool = option(
        False, "Accept links over loopback: all nodes are on this machine.", env="SHARDRING_LAB"
    )
    log_level: str = option(
        "info",
        "Least severity that is logged.",
        env="SHARDRING_LOG_LEVEL",
        choices=("debug", "info", "warning", "error"),
    )


async def serve(options: TopologyOptions) -> None:
    """Serve until SIGTERM or SIGINT. Raises ListenError, and INVALID_FIELD for a bad option."""
    start_logging(options.log_level)
    listen = parse_host_port(options.listen)
    if not 0.1 <= options.heartbeat_seconds <= 60:
        raise invalid_field("heartbeat_seconds", options.heartbeat_seconds, "0.1 to 60")
    stopped = asyncio.create_task(until_stopped(), name="until stopped")
    provider = start_telemetry("shardring-topology")
    app = TopologyApp(heartbeat_seconds=options.heartbeat_seconds, lab=options.lab)
    server = await start_server(listen, [topology_registration(app)])
    leases = asyncio.create_task(app.run_leases(), name="leases")
    try:
        announce("topology", HostPort(listen.host, server.port))
        await server.set_serving(True)
        await asyncio.wait([leases, stopped], return_when=asyncio.FIRST_COMPLETED)
    finally:
        app.close()
        await server.stop()
        stopped.cancel()
        leases.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await leases
        provider.shutdown()
