"""What can be seen from the machine that asks: which addresses it reaches, and how it fails."""

import asyncio
import ipaddress
import sys
from collections.abc import Iterable, Sequence

import psutil

from services.cli.doctor.findings import LocalFacts, Probe
from services.common.addresses import HostPort
from services.topology.domain.addresses import parsed

CONNECT_SECONDS = 1.5
MAX_CONCURRENT = 64

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


async def local_facts(targets: Iterable[tuple[str, HostPort]]) -> LocalFacts:
    """Dial every address: `targets` are node ids ("" for a service) and addresses."""
    networks = await asyncio.to_thread(own_networks)
    slots = asyncio.Semaphore(MAX_CONCURRENT)

    async def probe(node_id: str, address: HostPort) -> Probe:
        async with slots:
            answered, error = await _dial(address)
        on_subnet = on_own_subnet(address.host, networks)
        return Probe(node_id, address.host, answered, error, on_subnet)

    return LocalFacts(sys.platform, tuple(await asyncio.gather(*(probe(*t) for t in targets))))


def own_networks() -> list[Network]:
    """Return the networks that this machine's interfaces are in, loopback aside."""
    networks = []
    for entries in psutil.net_if_addrs().values():
        for entry in entries:
            address = parsed(entry.address.partition("%")[0])
            if address is None or address.is_loopback or not entry.netmask:
                continue
            mask = entry.netmask
            prefix = bin(int(ipaddress.ip_address(mask))).count("1") if ":" in mask else mask
            networks.append(ipaddress.ip_network(f"{address}/{prefix}", strict=False))
    return networks


def on_own_subnet(host: str, networks: Sequence[Network]) -> bool:
    """Return whether an address is in a network that an interface of this machine is in."""
    address = parsed(host)
    return address is not None and any(address in network for network in networks)


async def _dial(address: HostPort) -> tuple[bool, int | None]:
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            _, writer = await asyncio.open_connection(address.host, address.port)
    except TimeoutError:
        return False, None
    except OSError as error:
        return False, error.errno
    writer.close()
    return True, None
