"""Which addresses can join two machines."""

import ipaddress
import re

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
IpNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network

_ZONE = re.compile(r"[A-Za-z0-9._-]{1,64}")


def parsed(text: str) -> IpAddress | None:
    """Return an IP address, or None where `text` is none (such as a host name).

    An IPv4 address written in IPv6 (::ffff:10.0.0.1) is returned as IPv4. A zone has to be an
    interface's name; Python itself takes any text behind the "%".
    """
    _, zoned, zone = text.partition("%")
    if zoned and not _ZONE.fullmatch(zone):
        return None
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


def network_of(text: str) -> IpNetwork | None:
    """Return a network as "10.9.0.0/24" or "fd00::/64" names it; None where the text names none."""
    try:
        return ipaddress.ip_network(text)
    except ValueError:
        return None


def canonical(text: str) -> str:
    """Return an IP address in its one usual spelling; anything else unchanged."""
    address = parsed(text)
    return text if address is None else str(address)


def is_dialable(address: IpAddress) -> bool:
    """Say whether some machine can be dialled at this address.

    Not unspecified, multicast or broadcast ones. Link-local IPv6 is left out as well: it means
    nothing without the dialling machine's own zone. Link-local IPv4 (169.254.x.x) counts: it is
    what a cable between two Macs gets.
    """
    return not (
        address.is_unspecified
        or address.is_multicast
        or str(address) == "255.255.255.255"
        or (address.version == 6 and address.is_link_local)
    )


def can_link(address: IpAddress, *, lab: bool) -> bool:
    """Say whether a link between different nodes may end at this address.

    Loopback only in lab mode, where several nodes share one machine.
    """
    return is_dialable(address) and (lab or not address.is_loopback)
