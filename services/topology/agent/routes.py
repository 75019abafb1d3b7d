"""By which of its own addresses this machine reaches another."""

import contextlib
import socket

from services.common.addresses import HostPort
from services.topology.domain.addresses import canonical


def own_address_towards(address: HostPort) -> str:
    """Return the own address from which packets to an IP address leave, "" without a way there.

    Asks the routing table only: nothing is sent.
    """
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect((address.host, address.port))
        return canonical(str(probe.getsockname()[0]))
    return ""
