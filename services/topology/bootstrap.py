"""Builds and runs the topology service."""

import asyncio
import contextlib
import gc
from collections.abc import Sequence
from dataclasses import dataclass

from services.common.addresses import HostPort, parse_host_port
from services.common.errors import invalid_field
from services.common.logs import start_logging
from services.common.options import option
from services.common.security import ServerOptions, use_security
from services.common.server import announce, check_listen, start_server, until_stopped
from services.common.telemetry import start_telemetry
from services.topology.agent.interfaces import InterfaceReader, advertised_hosts
from services.topology.app import TopologyApp
from services.topology.discovery.advert import Advert, check_cluster_name
from services.topology.discovery.mdns import instance_name, keep_advertised
from services.topology.domain.addresses import parsed
from services.topology.domain.model import Interface
from services.topology.rpc.servicer import topology_registration


@dataclass(frozen=True)
class TopologyOptions(ServerOptions):
    """How the topology service runs."""

    listen: str = option(
        "127.0.0.1:52410",
        "Address and port to serve on; port 0 takes any free one.",
        env="SHARDRING_TOPOLOGY_LISTEN",
    )
    heartbeat_seconds: float = option(
        3.0, "How often nodes report, 0.1 to 60; after 3 missed reports a node counts as gone."
    )
    cluster_name: str = option(
        "shardring",
        "Name by which this cluster is told from others on the LAN.",
        env="SHARDRING_CLUSTER_NAME",
    )
    placement_port: int = option(
        52411, "Where placement listens on this machine, to be told on the LAN."
    )
    downloads_port: int = option(
        52412, "Where downloads listens on this machine, to be told on the LAN."
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
    security = use_security(options)
    listen = parse_host_port(options.listen)
    check_listen(listen, security)
    if not 0.1 <= options.heartbeat_seconds <= 60:
        raise invalid_field("heartbeat_seconds", options.heartbeat_seconds, "0.1 to 60")
    check_cluster_name(options.cluster_name)
    for name in ("placement_port", "downloads_port"):
        if not 1 <= getattr(options, name) <= 65535:
            raise invalid_field(name, getattr(options, name), "1 to 65535")
    # Links are many and go when their last user does; the little that is cyclic is young. Looking
    # at all of a large cluster holds every caller up for a tenth of a second: once in half an hour.
    gc.set_threshold(1_000, 5, 10_000)
    stopped = asyncio.create_task(until_stopped(), name="until stopped")
    provider = start_telemetry("shardring-topology")
    app = TopologyApp(heartbeat_seconds=options.heartbeat_seconds, lab=options.lab)
    server = await start_server(listen, [topology_registration(app)])
    address = HostPort(listen.host, server.port)
    interfaces = InterfaceReader()
    working = asyncio.create_task(app.run(), name="leases and links")
    advertising = asyncio.create_task(
        keep_advertised(lambda: advert_of(options, address.host, address.port, interfaces.read())),
        name="advertisement",
    )
    try:
        announce("topology", address)
        await server.set_serving(True)
        await asyncio.wait([working, stopped], return_when=asyncio.FIRST_COMPLETED)
    finally:
        app.close()
        await server.stop()
        for task in (working, advertising, stopped):
            task.cancel()
        await asyncio.wait([working, advertising, stopped])
        provider.shutdown()
    with contextlib.suppress(asyncio.CancelledError):
        working.result()


def advert_of(
    options: TopologyOptions, host: str, port: int, interfaces: Sequence[Interface]
) -> Advert | None:
    """Return what others on the LAN may find; None for a service of this machine only."""
    if options.lab:
        return None
    try:
        hosts = advertised_hosts(host, interfaces, lab=False)
    except OSError:
        return None  # the name to listen on cannot be looked up at the moment
    outward = [host for host in hosts if (ip := parsed(host)) and not ip.is_loopback]
    if not outward:
        return None
    return Advert(
        instance=instance_name(options.cluster_name, port),
        cluster_name=options.cluster_name,
        hosts=tuple(outward),
        topology_port=port,
        placement_port=options.placement_port,
        downloads_port=options.downloads_port,
    )
