"""The port a rank takes for the ring."""

import socket

from services.runner.domain.faults import ring_port_in_use
from services.runner.domain.ring import Rank


def check_port_free(rank: Rank) -> None:
    """Raise ShardringError(RING_PORT_IN_USE) when another process has the rank's port."""
    if rank.ring_port is None:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", rank.ring_port))
        except OSError as error:
            raise ring_port_in_use(rank) from error
