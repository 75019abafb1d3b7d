"""RDMA devices and whether they may be used, on macOS and Linux."""

import re
from collections.abc import Sequence
from pathlib import Path

from services.topology.domain.model import Rdma, RdmaDevice, ThunderboltPort

THUNDERBOLT_GENERATION = 5
_MACOS_PREFIX = "rdma_"
# "NAME  GUID", below a heading and a rule.
_DEVICE = re.compile(r"\s*(\S+)\s+(?:0x)?[0-9a-fA-F]{16}\s*")


def parse_rdma_status(text: str) -> bool:
    """Say whether `rdma_ctl status` means that RDMA is switched on."""
    words = text.lower().replace(".", " ").split()
    return "enabled" in words and "disabled" not in words and "not" not in words


def parse_ibv_devices(text: str) -> tuple[str, ...]:
    """Return the device names in the output of `ibv_devices`."""
    return tuple(found[1] for line in text.splitlines() if (found := _DEVICE.fullmatch(line)))


def macos_rdma(enabled: bool, names: Sequence[str], ports: Sequence[ThunderboltPort]) -> Rdma:
    """Return what can be done with RDMA on a Mac.

    Its devices are named after interfaces. Those of Thunderbolt ports count only where the port
    runs at Thunderbolt 5 and is in no bridge: others are listed by the system and do not work.
    """
    able = {p.interface for p in ports if p.generation >= THUNDERBOLT_GENERATION and not p.bridge}
    devices = []
    for name in names:
        interface = name.removeprefix(_MACOS_PREFIX) if name.startswith(_MACOS_PREFIX) else ""
        if not interface.startswith("en") or interface in able:
            devices.append(RdmaDevice(name, interface))
    return Rdma(enabled, tuple(devices))


def read_linux_rdma(root: Path = Path("/sys/class/infiniband")) -> Rdma:
    """Return the devices with an active port; Linux has no switch, so any device is enabled."""
    devices = []
    for path in sorted(root.iterdir()) if root.is_dir() else []:
        states = [_read(state) for state in path.glob("ports/*/state")]
        if any("ACTIVE" in state for state in states):
            nets = sorted(net.name for net in path.glob("device/net/*"))
            devices.append(RdmaDevice(path.name, nets[0] if nets else ""))
    return Rdma(bool(devices), tuple(devices))


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
