"""Addresses as text: parsing and printing `host:port`, with IPv6 in brackets."""

import ipaddress
import re
from dataclasses import dataclass

from services.common.errors import invalid_field

_HOST_NAME = re.compile(r"(?=.{1,253}\Z)\w([\w-]*\w)?(\.\w([\w-]*\w)?)*\.?", re.ASCII)


@dataclass(frozen=True, order=True)
class HostPort:
    """A host name or IP address without brackets, and a TCP port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_host_port(text: str, *, default_port: int | None = None) -> HostPort:
    """Read "host:port", "[v6]:port", or with a default port "host" or a bare IPv6 address.

    Raises ShardringError(INVALID_FIELD) when the text is none of these.
    """
    host, separator, port = text.strip().rpartition(":")
    if not separator or (host.count(":") and not host.startswith("[")):
        host, port = text.strip(), "" if default_port is None else str(default_port)
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isascii() or not port.isdigit() or not 0 <= int(port) <= 65535:
        raise invalid_field("address", text, "host:port, with IPv6 addresses in brackets")
    return HostPort(host, int(port))


def is_ip_address(host: str) -> bool:
    """Return whether the text is an IPv4 address, or an IPv6 address with or without a zone."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def check_reachable(field: str, address: HostPort) -> None:
    """Raise ShardringError(INVALID_FIELD) unless it can be dialled: a host, a port from 1 on."""
    if not is_ip_address(address.host) and not _HOST_NAME.fullmatch(address.host):
        raise invalid_field(f"{field}.address", address.host, "an IP address or a host name")
    if not 1 <= address.port <= 65535:
        raise invalid_field(f"{field}.port", address.port, "1 to 65535")
