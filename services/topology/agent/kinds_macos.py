"""Kinds of network interfaces on macOS, from the hardware ports that the system lists."""

import logging
import re
import subprocess
from collections.abc import Mapping

from services.topology.domain.model import InterfaceKind

logger = logging.getLogger(__name__)

_PORT = re.compile(r"^Hardware Port: (?P<port>.*)\nDevice: (?P<device>\S+)$", re.MULTILINE)
_OVERLAY_NAMES = ("utun", "ipsec", "ppp", "gif", "stf", "feth", "wg", "zt", "tun", "tap")
_VIRTUAL_NAMES = ("lo", "bridge", "vmnet", "vmenet", "vnic", "anpi", "ap", "awdl", "llw", "vlan")
# The ports that are built in; "Ethernet" on a later one may be an adapter or a Thunderbolt port.
_BUILT_IN = frozenset({"en0", "en1"})


def parse_hardware_ports(text: str) -> dict[str, str]:
    """Return port names by device, from the output of `networksetup -listallhardwareports`."""
    return {match["device"]: match["port"].strip() for match in _PORT.finditer(text)}


def macos_kind(name: str, ports: Mapping[str, str]) -> InterfaceKind:
    """Return the kind of one interface; `ports` are the port names by device."""
    port = ports.get(name)
    if port is None:
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
    try:
        listed = subprocess.run(
            ["/usr/sbin/networksetup", "-listallhardwareports"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("Cannot list hardware ports, so kinds of interfaces are unknown: %s", error)
        return {}
    return parse_hardware_ports(listed.stdout)
