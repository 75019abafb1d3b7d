"""What a node says of itself."""

import importlib.util
import logging
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from services.common.addresses import HostPort
from services.topology.agent.hardware import HardwareReader
from services.topology.agent.identity import Identity
from services.topology.agent.interfaces import InterfaceReader, advertised_hosts
from services.topology.domain.model import Backend, Interface, Node, Speed

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class MemoryRules:
    """How much of the machine's memory shards may take.

    `reserved_bytes` answers what is promised to shards in all; `loaded_bytes` the part of it that
    they already hold, and that the machine therefore no longer counts as free.
    """

    headroom_bytes: int = 0
    memory_bytes: int = 0  # what shards may take in all, by the owner's word; 0: see headroom
    reserved_bytes: Callable[[], int] = lambda: 0
    loaded_bytes: Callable[[], int] = lambda: 0


def available_bytes(total: int, free: int, rules: MemoryRules) -> int:
    """Return what shards may still take of a machine's memory, 0 to `total`.

    The owner's figure, or what is free without the shards minus the headroom; in either case
    minus all that is promised. Promised memory counts once, loaded or not.
    """
    for_shards = rules.memory_bytes or free + rules.loaded_bytes() - rules.headroom_bytes
    return max(0, min(total, for_shards - rules.reserved_bytes()))


def memory_left(rules: MemoryRules) -> int:
    """Return what shards may still take of this machine's memory now."""
    memory = psutil.virtual_memory()
    return available_bytes(memory.total, memory.available, rules)


def installed_backends() -> tuple[Backend, ...]:
    """Return what this machine can compute on; none without mlx. Does not import it."""
    if importlib.util.find_spec("mlx") is None:
        return ()
    return (Backend.METAL,) if sys.platform == "darwin" else (Backend.CPU,)


class Reporter:
    """Builds this node's report, with figures of the moment."""

    def __init__(
        self,
        identity: Identity,
        *,
        name: str,
        listen: HostPort,
        memory: MemoryRules,
        lab: bool,
        speed: Callable[[], Speed] = Speed,
    ) -> None:
        self._identity = identity
        self._name = name or socket.gethostname()
        self._listen = listen
        self._memory = memory
        self._lab = lab
        self._speed = speed
        self._backends = installed_backends()
        self._interfaces = InterfaceReader()
        self._hardware = HardwareReader()
        self._told: frozenset[Interface] = frozenset()

    def node(self) -> Node:
        """Return the report. Blocks for a moment. Raises OSError when a name is not found."""
        interfaces = self._interfaces.read()
        self._tell(interfaces)
        hardware = self._hardware.latest(interfaces)
        hosts = advertised_hosts(self._listen.host, interfaces, lab=self._lab)
        memory = psutil.virtual_memory()
        return Node(
            node_id=self._identity.node_id,
            name=self._name,
            start_ns=self._identity.start_ns,
            endpoints=tuple(HostPort(host, self._listen.port) for host in hosts),
            interfaces=interfaces,
            memory_total_bytes=memory.total,
            memory_available_bytes=available_bytes(memory.total, memory.available, self._memory),
            backends=self._backends,
            fingerprint=self._identity.fingerprint,
            rdma=hardware.rdma,
            thunderbolt_ports=hardware.thunderbolt_ports,
            speed=self._speed(),
        )

    def _tell(self, interfaces: tuple[Interface, ...]) -> None:
        """Log what differs from last time, once."""
        current = frozenset(interfaces)
        for gone in sorted(self._told - current, key=lambda interface: interface.name):
            logger.info("No longer: %s with %s", gone.name, ", ".join(gone.addresses))
        for new in sorted(current - self._told, key=lambda interface: interface.name):
            logger.info("Interface %s (%s): %s", new.name, new.kind, ", ".join(new.addresses))
        self._told = current
