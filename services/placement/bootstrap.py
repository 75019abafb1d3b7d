"""Wires the placement service together and serves it until the process is asked to stop."""

import asyncio
from dataclasses import dataclass

from services.common.addresses import HostPort, parse_host_port
from services.common.channel import Remote
from services.common.errors import invalid_field
from services.common.logs import start_logging
from services.common.options import option
from services.common.security import ServerOptions, use_security
from services.common.server import Registration, announce, check_listen, start_server, until_stopped
from services.common.telemetry import start_telemetry
from services.placement.adapters.downloads import DownloadsClient
from services.placement.adapters.topology import TopologyClient
from services.placement.app import PlacementApp
from services.placement.rpc.servicer import PlacementServicer
from shardring.placement.v1 import placement_service_pb2, placement_service_pb2_grpc

SERVICE = placement_service_pb2.DESCRIPTOR.services_by_name["PlacementService"].full_name


@dataclass(frozen=True)
class PlacementOptions(ServerOptions):
    """How a placement process is set up."""

    listen: str = option(
        "127.0.0.1:52411", "Address to serve on, host:port.", env="SHARDRING_PLACEMENT_LISTEN"
    )
    topology: str = option(
        "127.0.0.1:52410", "Where the topology service listens.", env="SHARDRING_TOPOLOGY"
    )
    downloads: str = option(
        "127.0.0.1:52412", "Where the downloads service listens.", env="SHARDRING_DOWNLOADS"
    )
    patience_seconds: float = option(
        0.0,
        "How long a call waits for topology and downloads to come back, 0 to 60, before it is "
        "refused for want of them.",
    )
    log_level: str = option(
        "info",
        "Least severe log lines to print.",
        env="SHARDRING_LOG_LEVEL",
        choices=("debug", "info", "warning", "error"),
    )


async def serve(options: PlacementOptions) -> None:
    """Serve until SIGTERM or SIGINT. Raises ListenError, or ShardringError for a bad address."""
    start_logging(options.log_level)
    security = use_security(options)
    listen, topology_address, downloads_address = (
        parse_host_port(text) for text in (options.listen, options.topology, options.downloads)
    )
    check_listen(listen, security)
    if not 0 <= options.patience_seconds <= 60:
        raise invalid_field("patience_seconds", options.patience_seconds, "0 to 60")
    stopped = asyncio.create_task(until_stopped(), name="until stopped")
    provider = start_telemetry("shardring-placement")
    topology = Remote("topology", [topology_address])
    downloads = Remote("downloads", [downloads_address])
    app = PlacementApp(
        TopologyClient(topology),
        DownloadsClient(downloads),
        patience_seconds=options.patience_seconds,
    )
    try:
        server = await start_server(
            listen,
            [
                Registration(
                    SERVICE,
                    lambda grpc_server: (
                        placement_service_pb2_grpc.add_PlacementServiceServicer_to_server(
                            PlacementServicer(app), grpc_server
                        )
                    ),
                )
            ],
        )
        try:
            announce("placement", HostPort(listen.host, server.port))
            # Stateless: nothing to wait for. A call says itself which service it misses.
            await server.set_serving(True)
            await stopped
        finally:
            await server.stop()
    finally:
        stopped.cancel()
        app.close()
        await topology.close()
        await downloads.close()
        # Sends the last spans.
        provider.shutdown()
