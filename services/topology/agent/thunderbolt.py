"""Thunderbolt ports, the machines cabled to them, and their bridges, on macOS and Linux."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.topology.domain.model import ThunderboltPort

THUNDERBOLT_5_BITS_PER_SECOND = 80 * 10**9

_SPEED = re.compile(r"([\d.]+)\s*Gb/s")
_PORT_NAME = re.compile(r"Thunderbolt (\d+)")
_XDOMAIN = re.compile(r"(\d+)-[0-9a-f]+")


@dataclass(frozen=True)
class Receptacle:
    """One port as `system_profiler` lists it; `number` is the one in "Thunderbolt 2"."""

    number: str
    domain: str
    peer_domains: tuple[str, ...]
    link_bits_per_second: int
    generation: int


def parse_thunderbolt(text: str) -> tuple[Receptacle, ...]:
    """Return the ports from `system_profiler SPThunderboltDataType -json`, by number.

    Peers are the other machines' ports, found behind hubs and docks too: what is plugged into
    these is nested in their entries. Drives and displays have no port of a machine and are no
    peers. Raises ValueError when the text is no such listing.
    """
    listing = json.loads(text)
    buses = listing.get("SPThunderboltDataType") if isinstance(listing, dict) else None
    if not isinstance(buses, list):
        raise ValueError("no SPThunderboltDataType in it")
    found = [
        receptacle for bus in buses if isinstance(bus, dict) for receptacle in _receptacles(bus)
    ]
    return tuple(sorted(found, key=lambda receptacle: (receptacle.number, receptacle.domain)))


def macos_ports(
    receptacles: Sequence[Receptacle],
    hardware_ports: Mapping[str, str],
    bridge_members: Mapping[str, Sequence[str]],
) -> tuple[ThunderboltPort, ...]:
    """Join the three listings: ports by number, port names by device, members by bridge."""
    interfaces = {
        named[1]: device
        for device, port in hardware_ports.items()
        if (named := _PORT_NAME.fullmatch(port))
    }
    bridges = {name: bridge for bridge, names in bridge_members.items() for name in names}
    ports = []
    for receptacle in receptacles:
        interface = interfaces.get(receptacle.number, "")
        ports.append(
            ThunderboltPort(
                interface=interface,
                domain=receptacle.domain,
                peer_domains=receptacle.peer_domains,
                link_bits_per_second=receptacle.link_bits_per_second,
                generation=receptacle.generation,
                bridge=bridges.get(interface, ""),
            )
        )
    return tuple(ports)


def read_linux_ports(root: Path = Path("/sys")) -> tuple[ThunderboltPort, ...]:
    """Return the ports that carry a network to another machine, from /sys.

    Linux shows a port's other end only once a network driver is bound to it.
    """
    devices = root / "bus/thunderbolt/devices"
    ports = []
    for net in sorted(devices.glob("*.*/net/*")) if devices.is_dir() else []:
        xdomain = devices / net.parent.parent.name.rpartition(".")[0]
        if not (matched := _XDOMAIN.fullmatch(xdomain.name)):
            continue
        host = devices / f"{matched[1]}-0"
        peer, master = _read(xdomain / "unique_id"), root / "class/net" / net.name / "master"
        generation = _read(host / "generation")
        ports.append(
            ThunderboltPort(
                interface=net.name,
                domain=_read(host / "unique_id"),
                peer_domains=(peer,) if peer else (),
                link_bits_per_second=_bits(_read(xdomain / "tx_speed"))
                * int(_read(xdomain / "tx_lanes") or "1"),
                generation=int(generation) if generation.isdigit() else 0,
                bridge=master.resolve().name if (master / "bridge").is_dir() else "",
            )
        )
    return tuple(ports)


def _receptacles(bus: Mapping[str, Any]) -> Iterator[Receptacle]:
    tags = [
        tag
        for key, tag in sorted(bus.items())
        if re.fullmatch(r"receptacle_\d+_tag", key) and isinstance(tag, dict)
    ]
    cabled = [tag for tag in tags if "no_devices" not in tag.get("receptacle_status_key", "")]
    peers = tuple(dict.fromkeys(_peer_domains(bus.get("_items"))))
    for tag in tags:
        bits = _bits(str(tag.get("current_speed_key", "")))
        yield Receptacle(
            number=str(tag.get("receptacle_id_key", "")),
            domain=str(bus.get("domain_uuid_key", "")),
            # Where one bus has two ports, the listing does not say which of them it is.
            peer_domains=peers if tag in cabled else (),
            link_bits_per_second=bits,
            generation=_generation(bits, str(bus.get("_name", ""))),
        )


def _peer_domains(items: object) -> Iterator[str]:
    for item in items if isinstance(items, list) else []:
        if isinstance(item, dict):
            if domain := item.get("domain_uuid_key"):
                yield str(domain)
            yield from _peer_domains(item.get("_items"))


def _generation(bits: int, bus_name: str) -> int:
    if bits >= THUNDERBOLT_5_BITS_PER_SECOND:
        return 5
    # A Thunderbolt 5 port whose cable or other end is slower carries no more than Thunderbolt 4.
    return 0 if not bits else 4 if "usb4" in bus_name else 3


def _bits(text: str) -> int:
    found = _SPEED.search(text)
    return round(float(found[1]) * 10**9) if found else 0


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
