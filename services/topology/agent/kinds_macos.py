"""Kinds of network interfaces on macOS, from the hardware ports that the system lists."""

import logging
import re
import subprocess
from collections.abc import Mapping, Sequence

from services.topology.domain.model import InterfaceKind

logger = logging.getLogger(__name__)

_PORT = re.compile(r"^Hardware Port: (?P<port>.*)\nDevice: (?P<device>\S+)$", re.MULTILINE)
_HEAD = re.compile(r"^(?P<name>\w+): flags=[0-9a-f]+<(?P<flags>[^>]*)>")
_MEMBER = re.compile(r"^\s+member: (\S+)")
_OVERLAY_NAMES = ("utun", "ipsec", "ppp", "gif", "stf", "feth", "wg", "zt", "tun", "tap")
_VIRTUAL_NAMES = ("lo", "bridge", "vmnet", "vmenet", "vnic", "anpi", "ap", "awdl", "llw", "vlan")
_BRIDGED = (
    InterfaceKind.THUNDERBOLT,
    InterfaceKind.ETHERNET,
    InterfaceKind.MAYBE_ETHERNET,
    InterfaceKind.WIFI,
)
# The ports that are built in; "Ethernet" on a later one may be an adapter or a Thunderbolt port.
_BUILT_IN = frozenset({"en0", "en1"})


def parse_hardware_ports(text: str) -> dict[str, str]:
    """Return port names by device, from the output of `networksetup -listallhardwareports`."""
    return {match["device"]: match["port"].strip() for match in _PORT.finditer(text)}


def parse_bridge_members(text: str) -> dict[str, tuple[str, ...]]:
    """Return the members of each bridge that is up, from the output of `ifconfig`."""
    members: dict[str, list[str]] = {}
    current: list[str] | None = None
    for line in text.splitlines():
        if head := _HEAD.match(line):
            current = None
            if "UP" in head["flags"].split(","):
                current = members.setdefault(head["name"], [])
        elif current is not None and (member := _MEMBER.match(line)):
            current.append(member[1])
    return {bridge: tuple(names) for bridge, names in members.items() if names}


def macos_kind(
    name: str, ports: Mapping[str, str], bridge_members: Mapping[str, Sequence[str]] | None = None
) -> InterfaceKind:
    """Return the kind of one interface; `ports` are the port names by device.

    A bridge that is no hardware port is what it stands on: one over a network card is Ethernet,
    those of virtual machines are virtual.
    """
    port = ports.get(name)
    if port is None:
        kinds = {macos_kind(member, ports) for member in (bridge_members or {}).get(name, ())}
        if best := next((kind for kind in _BRIDGED if kind in kinds), None):
            return best
        if name.startswith(_OVERLAY_NAMES):
            return InterfaceKind.OVERLAY
        if name.startswith(_VIRTUAL_NAMES):
            return InterfaceKind.VIRTUAL
        return InterfaceKind.UNKNOWN
    words = set(re.split(r"[^a-z0-9]+", port.lower()))
    if {"wi", "fi"} <= words or words & {"wifi", "airport"}:
        return InterfaceKind.WIFI
    # "Thunderbolt Ethernet" is an adapter that speaks Ethernet; see below.
    if "thunderbolt" in words and "ethernet" not in words:
        return InterfaceKind.THUNDERBOLT
    if words & {"ethernet", "lan", "10gbe"}:
        return InterfaceKind.ETHERNET if name in _BUILT_IN else InterfaceKind.MAYBE_ETHERNET
    return InterfaceKind.UNKNOWN


def read_hardware_ports() -> dict[str, str]:
    """Ask the system for its hardware ports; empty, with a word in the log, if it won't say."""
    return parse_hardware_ports(_output("/usr/sbin/networksetup", "-listallhardwareports"))


def read_bridge_members() -> dict[str, tuple[str, ...]]:
    """Ask the system for its bridges; empty, with a word in the log, if it won't say."""
    return parse_bridge_members(_output("/sbin/ifconfig"))


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("Interfaces may be of unknown kind: %s", error)
        return ""
    return done.stdout
