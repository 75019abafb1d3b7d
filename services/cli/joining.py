"""Where the cluster is: as told, by file, on this machine, or found on the LAN."""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from services.common.addresses import HostPort, parse_host_port
from services.common.errors import Reason, ShardringError
from services.topology.discovery.advert import Advert, check_cluster_name, chosen

TOPOLOGY_PORT, PLACEMENT_PORT, DOWNLOADS_PORT = 52410, 52411, 52412
LOCAL = "127.0.0.1"
JOIN_FILE = "join"
# How often a node that found no cluster asks the LAN again.
LOOK_AGAIN_SECONDS = 8.0

logger = logging.getLogger(__name__)

_CONNECT_SECONDS = 1.0

Browse = Callable[[], Awaitable[Sequence[Advert]]]


@dataclass(frozen=True)
class Services:
    """Where a cluster's three services listen, and how that is known, for the log."""

    topology: HostPort
    placement: HostPort
    downloads: HostPort
    source: str

    @staticmethod
    def at(host: str, source: str, topology_port: int = TOPOLOGY_PORT) -> "Services":
        """Return services on their usual ports of one host."""
        return Services(
            HostPort(host, topology_port),
            HostPort(host, PLACEMENT_PORT),
            HostPort(host, DOWNLOADS_PORT),
            source,
        )


def told(join: str, data_dir: str) -> Services | None:
    """Return the services as named by `join` ("host" or "host:port" of topology), or else by the
    file `join` in the data folder; None where neither says anything.

    Raises INVALID_FIELD for what is no address.
    """
    source = "as told"
    if not join:
        path = Path(data_dir).expanduser() / JOIN_FILE
        with contextlib.suppress(OSError):
            lines = (line.strip() for line in path.read_text(errors="replace").splitlines())
            join = next((line for line in lines if line and not line.startswith("#")), "")
            source = f"from {path}"
    if not join:
        return None
    address = parse_host_port(join, default_port=TOPOLOGY_PORT)
    return Services.at(address.host, source, address.port)


async def found(cluster_name: str, browse: Browse | None = None) -> Services:
    """Look for the cluster on this machine, then on the LAN, for about two seconds.

    A topology service on this machine is taken unless a name is asked for. `browse` finds
    services on the LAN; by default by DNS-SD. Raises CLUSTER_NOT_FOUND, CLUSTER_AMBIGUOUS and
    INVALID_FIELD.
    """
    if cluster_name:
        check_cluster_name(cluster_name)
    elif await _answering([LOCAL], TOPOLOGY_PORT):
        return Services.at(LOCAL, "on this machine")
    try:
        adverts = await (browse or _browse)()
    except OSError:
        adverts = ()  # no network to ask on
    advert = chosen(adverts, cluster_name)
    host = await _answering(
        others_addresses(advert.hosts, await asyncio.to_thread(own_addresses)), advert.topology_port
    )
    if host is None:
        raise ShardringError(
            Reason.SERVICE_UNAVAILABLE,
            f"Cluster {advert.cluster_name} was found on the LAN, but its topology service answers "
            f"at none of its addresses: {', '.join(advert.hosts)}, port {advert.topology_port}.",
            metadata={
                "service": "topology",
                "address": str(HostPort(advert.hosts[0], advert.topology_port)),
            },
        )
    return Services(
        HostPort(host, advert.topology_port),
        HostPort(host, advert.placement_port),
        HostPort(host, advert.downloads_port),
        f"cluster {advert.cluster_name} on the LAN",
    )


def others_addresses(hosts: Sequence[str], own: Collection[str]) -> Sequence[str]:
    """Return the addresses that are not this machine's own; all, when it is this machine.

    A container bridge has the same address on many machines: dialled from here it leads to here.
    """
    return [host for host in hosts if host not in own] or hosts


def own_addresses() -> set[str]:
    """Return the addresses of this machine's interfaces. Blocks for a moment."""
    return {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}


async def _browse() -> Sequence[Advert]:
    # Not above: most commands need none of it, and it takes a while to import.
    from services.topology.discovery import mdns

    return await mdns.browse()


async def found_in_time(cluster_name: str) -> Services:
    """Look for the cluster as `found` does, again and again until it is there.

    Says in the log what is missing. Raises CLUSTER_AMBIGUOUS and INVALID_FIELD.
    """
    pauses = itertools.chain((1.0, 2.0, 4.0), itertools.repeat(LOOK_AGAIN_SECONDS))
    said = ""
    while True:
        try:
            services = await found(cluster_name)
        except ShardringError as error:
            if error.reason not in (Reason.CLUSTER_NOT_FOUND, Reason.SERVICE_UNAVAILABLE):
                raise
            if error.message != said:
                said = error.message
                logger.warning("%s This node looks on; --join names an address.", said)
            await asyncio.sleep(next(pauses))
        else:
            logger.info("Topology is at %s, %s", services.topology, services.source)
            return services


async def _answering(hosts: Sequence[str], port: int) -> str | None:
    """Return the first of `hosts`, in their order, that takes a connection; None if none does."""

    async def answers(host: str) -> bool:
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                _, writer = await asyncio.open_connection(host, port)
        except (OSError, TimeoutError):
            return False
        writer.close()
        return True

    answered = await asyncio.gather(*(answers(host) for host in hosts))
    return next((host for host, ok in zip(hosts, answered, strict=True) if ok), None)
