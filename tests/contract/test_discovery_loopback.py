"""DNS-SD between processes' sockets on loopback; between hosts see tests/e2e/test_discovery.py."""

import asyncio
from dataclasses import replace

from services.topology.discovery.advert import Advert
from services.topology.discovery.mdns import advertised, browse

LOOPBACK = ["127.0.0.1"]


def advert(name: str, port: int) -> Advert:
    return Advert(f"lab {name} {port}", name, ("10.0.0.4", "fd00::4"), port, port + 1, port + 2)


async def seen(instances: set[str]) -> list[Advert]:
    """Browse until exactly these are found; other clusters on this machine do not matter."""
    async with asyncio.timeout(30):
        while True:
            found = [a for a in await browse(interfaces=LOOPBACK) if a.instance.startswith("lab ")]
            if {one.instance for one in found} == instances:
                return found


async def test_services_are_found_while_they_are_there() -> None:
    red, blue = advert("red", 52410), advert("blue", 6000)
    async with advertised(red, LOOPBACK):
        async with advertised(blue, LOOPBACK):
            assert await seen({red.instance, blue.instance}) == [blue, red]
        assert await seen({red.instance}) == [red]
    assert await seen(set()) == []


async def test_two_services_of_one_cluster_are_both_found() -> None:
    red = advert("red", 52410)
    other = replace(red, instance=f"{red.instance} again")
    async with advertised(red, LOOPBACK), advertised(other, LOOPBACK):
        assert await seen({red.instance, other.instance}) == [other, red]
