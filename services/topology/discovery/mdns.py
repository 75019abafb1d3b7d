"""DNS-SD over multicast DNS: saying that a topology service is here, and looking for others."""

import asyncio
import contextlib
import logging
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from zeroconf import Error as ZeroconfError
from zeroconf import InterfaceChoice, ServiceStateChange, Zeroconf
from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

from services.topology.discovery.advert import SERVICE_TYPE, Advert, advert_from_txt, advert_to_txt

logger = logging.getLogger(__name__)

# How long to listen for answers. They come within a tenth of a second from machines that are awake;
# the rest is for a second question, sent when the first got lost.
BROWSE_SECONDS = 1.5
# How often a machine's own addresses are looked at again.
REFRESH_SECONDS = 30.0
_RESOLVE_MILLISECONDS = 1_000

# The addresses of the interfaces to use; None: all there are.
Interfaces = Sequence[str] | None


@asynccontextmanager
async def advertised(advert: Advert, interfaces: Interfaces = None) -> AsyncIterator[None]:
    """Answer questions about `advert` while the context lasts, and take leave at its end.

    Raises OSError or ZeroconfError where there is no network to do so.
    """
    service = _zeroconf(interfaces)
    info = AsyncServiceInfo(
        SERVICE_TYPE,
        f"{advert.instance}.{SERVICE_TYPE}",
        port=advert.topology_port,
        properties=advert_to_txt(advert),
        parsed_addresses=list(advert.hosts),
        # A host name of its own: the machine's belongs to its operating system.
        server=f"shardring-{secrets.token_hex(4)}.local.",
    )
    try:
        await (await service.async_register_service(info, allow_name_change=True))
        yield
    finally:
        with contextlib.suppress(OSError, ZeroconfError):  # the network may have gone meanwhile
            await service.async_unregister_all_services()
        await service.async_close()


async def keep_advertised(make_advert: Callable[[], Advert | None]) -> None:
    """Advertise until cancelled, anew whenever `make_advert` (which may block) returns another.

    None: there is nothing to say now. Without a network it is tried again. Raises nothing.
    """
    told: str | None = None
    while True:
        advert = current = await asyncio.to_thread(make_advert)
        try:
            async with contextlib.AsyncExitStack() as stack:
                if advert is not None:
                    await stack.enter_async_context(advertised(advert))
                    logger.info("Found on the LAN as cluster %s", advert.described())
                told = None
                while current == advert:
                    await asyncio.sleep(REFRESH_SECONDS)
                    current = await asyncio.to_thread(make_advert)
        except (OSError, ZeroconfError) as error:
            if told != str(error):
                told = str(error)
                logger.warning("Not to be found on the LAN, only by address: %r", error)
            await asyncio.sleep(REFRESH_SECONDS)
        except Exception:
            # The cluster goes on: nobody needs this but those who look for it.
            logger.exception("Not to be found on the LAN any more, only by address")
            return


async def browse(
    seconds: float = BROWSE_SECONDS, interfaces: Interfaces = None
) -> tuple[Advert, ...]:
    """Return the topology services that answer within `seconds`, by instance.

    Raises OSError where there is no network to ask on.
    """
    names: set[str] = set()

    def on_change(
        zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange
    ) -> None:
        (names.discard if state_change is ServiceStateChange.Removed else names.add)(name)

    service = _zeroconf(interfaces)
    try:
        browser = AsyncServiceBrowser(service.zeroconf, SERVICE_TYPE, handlers=[on_change])
        await asyncio.sleep(seconds)
        found = await asyncio.gather(*(_resolved(service.zeroconf, name) for name in sorted(names)))
        await browser.async_cancel()
    except ZeroconfError as error:
        raise OSError(f"DNS-SD: {error!r}") from error
    finally:
        await service.async_close()
    return tuple(advert for advert in found if advert is not None)


async def _resolved(zeroconf: Zeroconf, name: str) -> Advert | None:
    info = AsyncServiceInfo(SERVICE_TYPE, name)
    if not await info.async_request(zeroconf, _RESOLVE_MILLISECONDS):
        return None
    txt = {
        key.decode(errors="replace"): (value or b"").decode(errors="replace")
        for key, value in info.properties.items()
    }
    hosts = [host for host in info.parsed_addresses() if not host.startswith("fe80")]
    return advert_from_txt(name.removesuffix(f".{SERVICE_TYPE}"), hosts, info.port or 0, txt)


def instance_name(cluster_name: str, port: int) -> str:
    """Return a name for this service on the LAN that no other has, at most DNS' 63 bytes."""
    host = socket.gethostname().partition(".")[0]
    return f"{host[:24]} {cluster_name[:20]} {port} {secrets.token_hex(2)}"


def _zeroconf(interfaces: Interfaces) -> AsyncZeroconf:
    return AsyncZeroconf(interfaces=InterfaceChoice.All if interfaces is None else list(interfaces))
