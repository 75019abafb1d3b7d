"""What lies below the interfaces: Thunderbolt cabling, bridges and RDMA, read now and then."""

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from services.topology.agent.kinds_macos import read_bridge_members, read_hardware_ports
from services.topology.agent.rdma import (
    macos_rdma,
    parse_ibv_devices,
    parse_rdma_status,
    read_linux_rdma,
)
from services.topology.agent.thunderbolt import (
    macos_ports,
    parse_thunderbolt,
    read_linux_ports,
)
from services.topology.domain.model import Interface, Rdma, ThunderboltPort

logger = logging.getLogger(__name__)

# A cable between bridged ports changes no interface, so look again by time too. Asking macOS
# takes about a fifth of a second of a core.
REFRESH_SECONDS = 120.0


@dataclass(frozen=True)
class Hardware:
    """The part of a node's report that says how it is cabled."""

    thunderbolt_ports: tuple[ThunderboltPort, ...] = ()
    rdma: Rdma = field(default_factory=Rdma)


class HardwareReader:
    """Reads the hardware in the background: when the interfaces differ, and every two minutes."""

    def __init__(self, read: Callable[[], Hardware] | None = None) -> None:
        """`read` asks the system; it may block."""
        self._read = read or read_hardware
        self._hardware = Hardware()
        self._interfaces: Sequence[Interface] | None = None
        self._due = 0.0
        self._reading: threading.Thread | None = None

    def latest(self, interfaces: Sequence[Interface]) -> Hardware:
        """Return the hardware as last read, at once; begin to read it anew if that is due."""
        now = time.monotonic()
        due = interfaces != self._interfaces or now >= self._due
        if due and (self._reading is None or not self._reading.is_alive()):
            self._interfaces, self._due = interfaces, now + REFRESH_SECONDS
            # macOS may take seconds to answer, longer than a heartbeat may be late. A daemon, so
            # that it keeps no process from ending; what it waits for has time limits of its own.
            self._reading = threading.Thread(target=self._refresh, name="hardware", daemon=True)
            self._reading.start()
        return self._hardware

    def _refresh(self) -> None:
        hardware = self._read()
        if hardware != self._hardware:
            logger.info("Cabling: %s", described(hardware))
        self._hardware = hardware


def described(hardware: Hardware) -> str:
    """Return the hardware in a few words, for the log."""
    ports = [
        f"{port.interface or port.domain} Thunderbolt {port.generation or '?'}"
        + (", cabled to a machine" if port.peer_domains else "")
        + (f", in {port.bridge}" if port.bridge else "")
        for port in hardware.thunderbolt_ports
    ]
    names = ", ".join(device.name for device in hardware.rdma.devices) or "no device"
    rdma = f"RDMA {'on' if hardware.rdma.enabled else 'off'} ({names})"
    return "; ".join([*ports, rdma])


def read_hardware() -> Hardware:
    """Ask the system for ports, cabling and RDMA. Blocks, on macOS for a second or two."""
    if sys.platform != "darwin":
        return Hardware(read_linux_ports(), read_linux_rdma())
    ports: tuple[ThunderboltPort, ...] = ()
    listing = _output("/usr/sbin/system_profiler", "SPThunderboltDataType", "-json")
    try:
        receptacles = parse_thunderbolt(listing) if listing else ()
    except ValueError as error:
        logger.warning("Cannot read the list of Thunderbolt ports: %s", error)
    else:
        ports = macos_ports(receptacles, read_hardware_ports(), read_bridge_members())
    # Both are absent before macOS 26.2, which has no RDMA over Thunderbolt.
    enabled = parse_rdma_status(_output("rdma_ctl", "status"))
    names = parse_ibv_devices(_output("ibv_devices"))
    return Hardware(ports, macos_rdma(enabled, names, ports))


def _output(*command: str) -> str:
    """Return what a command prints; "" where it is missing, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=15)
    except (OSError, subprocess.SubprocessError) as error:
        logger.debug("%s: %s", command[0], error)
        return ""
    return done.stdout if done.returncode == 0 else ""
