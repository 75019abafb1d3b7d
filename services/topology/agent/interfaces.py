"""This machine's network interfaces, and which of its addresses others are told."""

import socket
import sys
from collections.abc import Sequence

import psutil

from services.topology.agent.kinds_linux import linux_kind, read_linux_facts
from services.topology.agent.kinds_macos import (
    macos_kind,
    read_bridge_members,
    read_hardware_ports,
)
from services.topology.domain.addresses import can_link, canonical, is_dialable, parsed
from services.topology.domain.model import Interface, InterfaceKind

# Which address to name first; measured links decide later.
_BEST_FIRST = (
    InterfaceKind.THUNDERBOLT,
    InterfaceKind.MAYBE_ETHERNET,
    InterfaceKind.ETHERNET,
    InterfaceKind.WIFI,
    InterfaceKind.UNKNOWN,
    InterfaceKind.VIRTUAL,
    InterfaceKind.OVERLAY,
)
_FAMILIES = frozenset({socket.AF_INET, socket.AF_INET6})


class InterfaceReader:
    """Reads the interfaces; asks for kinds again only when an interface comes or goes."""

    def __init__(self) -> None:
        self._names: frozenset[str] = frozenset()
        self._kinds: dict[str, InterfaceKind] = {}

    def read(self) -> tuple[Interface, ...]:
        """Return the interfaces that are up and carry an address, ordered by name.

        Link-local IPv6 addresses are left out: they mean nothing on another machine without its
        own zone. Blocks, on macOS for as long as the system takes to list its ports.
        """
        addresses = psutil.net_if_addrs()
        stats = psutil.net_if_stats()
        if frozenset(addresses) != self._names:
            self._kinds = _kinds(list(addresses))
            self._names = frozenset(addresses)
        interfaces = []
        for name in sorted(addresses):
            usable = [
                canonical(entry.address)
                for entry in addresses[name]
                if entry.family in _FAMILIES and _is_usable(entry.address)
            ]
            if usable and (name not in stats or stats[name].isup):
                interfaces.append(Interface(name, self._kinds[name], tuple(usable)))
        return tuple(interfaces)


def advertised_hosts(
    listen_host: str, interfaces: Sequence[Interface], *, lab: bool
) -> tuple[str, ...]:
    """Return the addresses at which others may reach a server on `listen_host`, best guess first.

    A specific address stands alone; a host name is looked up; for 0.0.0.0 and :: they are the
    interfaces' addresses. Loopback comes with lab mode, or where there is nothing else: a machine
    without a network still serves itself.
    """
    listened = parsed(listen_host)
    if listened is None:
        found = socket.getaddrinfo(listen_host, None, type=socket.SOCK_STREAM)
        return tuple(dict.fromkeys(canonical(str(entry[4][0])) for entry in found))
    if not listened.is_unspecified:
        return (str(listened),)
    ranked = sorted(
        (address.is_loopback, _BEST_FIRST.index(interface.kind), address.version, str(address))
        for interface in interfaces
        for address in map(parsed, interface.addresses)
        if address is not None and is_dialable(address)
    )
    with_loopback = lab or all(is_loopback for is_loopback, *_ in ranked)
    hosts = [host for is_loopback, *_, host in ranked if with_loopback or not is_loopback]
    return tuple(dict.fromkeys(hosts))


def _is_usable(text: str) -> bool:
    address = parsed(text)
    return address is not None and can_link(address, lab=True)


def _kinds(names: Sequence[str]) -> dict[str, InterfaceKind]:
    if sys.platform == "darwin":
        ports, members = read_hardware_ports(), read_bridge_members()
        return {name: macos_kind(name, ports, members) for name in names}
    facts = read_linux_facts()
    return {name: linux_kind(name, facts) for name in names}
