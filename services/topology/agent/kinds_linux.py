"""Kinds of network interfaces on Linux, from what /sys/class/net says."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from services.topology.domain.model import InterfaceKind

SYS_CLASS_NET = Path("/sys/class/net")

# Link types of include/uapi/linux/if_arp.h.
_ETHER, _LOOPBACK = 1, 772
# ARPHRD_TUNNEL, _TUNNEL6, _SIT, _IPGRE, _IP6GRE, and _NONE (tun, WireGuard).
_TUNNEL_TYPES = frozenset({768, 769, 776, 778, 823, 65534})
_OVERLAY_NAMES = ("tailscale", "wg", "zt", "nebula", "netmaker", "nm-")
_OVERLAY_DEVTYPES = frozenset({"wireguard", "vxlan", "geneve", "gretap", "ppp"})
# IFF_TAP in tun_flags: an Ethernet-like end, which virtual machines use.
_IFF_TAP = 2
_BEST_FIRST = (
    InterfaceKind.THUNDERBOLT,
    InterfaceKind.ETHERNET,
    InterfaceKind.WIFI,
    InterfaceKind.OVERLAY,
)


@dataclass(frozen=True)
class LinuxFacts:
    """What /sys/class/net/NAME says of one interface."""

    link_type: int = _ETHER
    devtype: str = ""
    driver: str = ""
    has_device: bool = False
    is_wireless: bool = False
    tun_flags: int | None = None
    lower: tuple[str, ...] = ()


def linux_kind(name: str, facts: Mapping[str, LinuxFacts]) -> InterfaceKind:
    """Return the kind of one interface; `facts` holds all of the machine's by name.

    A bridge, bond or VLAN is what it stands on: br0 over a network card is Ethernet, docker0 over
    container ends is virtual.
    """
    own = facts.get(name)
    if own is None:
        return InterfaceKind.UNKNOWN
    if own.link_type == _LOOPBACK:
        return InterfaceKind.VIRTUAL
    if name.startswith(_OVERLAY_NAMES) or own.devtype in _OVERLAY_DEVTYPES:
        return InterfaceKind.OVERLAY
    if own.tun_flags is not None:
        return InterfaceKind.VIRTUAL if own.tun_flags & _IFF_TAP else InterfaceKind.OVERLAY
    if own.link_type in _TUNNEL_TYPES:
        return InterfaceKind.OVERLAY
    if own.driver.replace("_", "-") == "thunderbolt-net":
        return InterfaceKind.THUNDERBOLT
    if own.is_wireless:
        return InterfaceKind.WIFI
    if own.has_device:
        return InterfaceKind.ETHERNET if own.link_type == _ETHER else InterfaceKind.UNKNOWN
    # A container may see an interface but not what it stands on, and loops are not excluded.
    others = {other: fact for other, fact in facts.items() if other != name}
    kinds = {linux_kind(lower, others) for lower in own.lower}
    return next((kind for kind in _BEST_FIRST if kind in kinds), InterfaceKind.VIRTUAL)


def read_linux_facts(root: Path = SYS_CLASS_NET) -> dict[str, LinuxFacts]:
    """Read the facts of all interfaces; one that goes away meanwhile counts as unknown.

    None, and thus all unknown, where a container has no /sys.
    """
    if not root.is_dir():
        return {}
    return {path.name: _read_facts(path) for path in root.iterdir() if path.is_dir()}


def _read_facts(path: Path) -> LinuxFacts:
    uevent = dict(line.split("=", 1) for line in _read(path / "uevent").splitlines() if "=" in line)
    driver = path / "device" / "driver"
    tun_flags = _read(path / "tun_flags")
    return LinuxFacts(
        link_type=int(_read(path / "type") or "-1"),
        devtype=uevent.get("DEVTYPE", ""),
        driver=driver.resolve().name if driver.exists() else "",
        has_device=(path / "device").exists(),
        is_wireless=uevent.get("DEVTYPE") == "wlan"
        or (path / "wireless").exists()
        or (path / "phy80211").exists(),
        tun_flags=int(tun_flags, 16) if tun_flags else None,
        lower=tuple(sorted(p.name.removeprefix("lower_") for p in path.glob("lower_*"))),
    )


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
