"""Kinds of interfaces, from recorded output of several machines."""

from pathlib import Path

import pytest

from services.topology.agent.kinds_linux import LinuxFacts, linux_kind, read_linux_facts
from services.topology.agent.kinds_macos import macos_kind, parse_hardware_ports
from services.topology.domain.model import InterfaceKind as Kind

MAC_STUDIO = """
Hardware Port: Ethernet
Device: en0
Ethernet Address: 00:00:5e:00:53:01

Hardware Port: Wi-Fi
Device: en1
Ethernet Address: 00:00:5e:00:53:02

Hardware Port: Thunderbolt 1
Device: en2
Ethernet Address: 00:00:5e:00:53:03

Hardware Port: Ethernet Adapter (en6)
Device: en6
Ethernet Address: 00:00:5e:00:53:04

Hardware Port: Thunderbolt Bridge
Device: bridge0
Ethernet Address: 00:00:5e:00:53:03

Hardware Port: Thunderbolt Ethernet Slot 0
Device: en9
Ethernet Address: 00:00:5e:00:53:05

VLAN Configurations
===================
"""
MACBOOK = """
Hardware Port: Wi-Fi
Device: en0
Ethernet Address: 00:00:5e:00:53:11

Hardware Port: USB 10/100/1000 LAN
Device: en7
Ethernet Address: 00:00:5e:00:53:12

Hardware Port: iPhone USB
Device: en8
Ethernet Address: N/A

Hardware Port: Bluetooth PAN
Device: en5
Ethernet Address: 00:00:5e:00:53:13

VLAN Configurations
===================
"""


@pytest.mark.parametrize(
    ("text", "device", "kind"),
    [
        (MAC_STUDIO, "en0", Kind.ETHERNET),
        (MAC_STUDIO, "en1", Kind.WIFI),
        (MAC_STUDIO, "en2", Kind.THUNDERBOLT),
        (MAC_STUDIO, "bridge0", Kind.THUNDERBOLT),
        (MAC_STUDIO, "en6", Kind.MAYBE_ETHERNET),
        (MAC_STUDIO, "en9", Kind.MAYBE_ETHERNET),
        (MACBOOK, "en0", Kind.WIFI),
        (MACBOOK, "en7", Kind.MAYBE_ETHERNET),
        (MACBOOK, "en8", Kind.UNKNOWN),
        (MACBOOK, "en5", Kind.UNKNOWN),
        (MACBOOK, "lo0", Kind.VIRTUAL),
        (MACBOOK, "bridge100", Kind.VIRTUAL),
        (MACBOOK, "utun4", Kind.OVERLAY),
        (MACBOOK, "awdl0", Kind.VIRTUAL),
        (MACBOOK, "en99", Kind.UNKNOWN),
        ("", "en0", Kind.UNKNOWN),
    ],
)
def test_macos(text: str, device: str, kind: Kind) -> None:
    assert macos_kind(device, parse_hardware_ports(text)) is kind


def test_hardware_ports_are_read_by_device() -> None:
    assert parse_hardware_ports(MACBOOK) == {
        "en0": "Wi-Fi",
        "en7": "USB 10/100/1000 LAN",
        "en8": "iPhone USB",
        "en5": "Bluetooth PAN",
    }


LINUX = {
    "lo": LinuxFacts(link_type=772),
    "eth0": LinuxFacts(driver="virtio_net", has_device=True),
    "enp3s0": LinuxFacts(driver="igc", has_device=True),
    "wlp4s0": LinuxFacts(driver="iwlwifi", has_device=True, is_wireless=True, devtype="wlan"),
    "thunderbolt0": LinuxFacts(driver="thunderbolt-net", has_device=True),
    "ib0": LinuxFacts(link_type=32, driver="mlx5_core", has_device=True),
    "docker0": LinuxFacts(devtype="bridge", lower=("veth12ab",)),
    "veth12ab": LinuxFacts(),
    "virbr0": LinuxFacts(devtype="bridge", lower=("vnet0",)),
    "vnet0": LinuxFacts(tun_flags=0x1002),
    "br0": LinuxFacts(devtype="bridge", lower=("enp3s0", "vnet0")),
    "bond0": LinuxFacts(devtype="bond", lower=("enp3s0", "eth0")),
    "eth0.7": LinuxFacts(devtype="vlan", lower=("eth0",)),
    "cni0": LinuxFacts(devtype="bridge", lower=("gone",)),
    "dummy0": LinuxFacts(),
    "tailscale0": LinuxFacts(link_type=65534, tun_flags=0x1001),
    "wg0": LinuxFacts(link_type=65534, devtype="wireguard"),
    "home": LinuxFacts(link_type=65534, devtype="wireguard"),
    "ztabcdef12": LinuxFacts(tun_flags=0x1002),
    "tun0": LinuxFacts(link_type=65534, tun_flags=0x1001),
    "flannel.1": LinuxFacts(devtype="vxlan", lower=("eth0",)),
    "gre1": LinuxFacts(link_type=778),
    "loop": LinuxFacts(lower=("loop",)),
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("lo", Kind.VIRTUAL),
        ("eth0", Kind.ETHERNET),
        ("enp3s0", Kind.ETHERNET),
        ("wlp4s0", Kind.WIFI),
        ("thunderbolt0", Kind.THUNDERBOLT),
        ("ib0", Kind.UNKNOWN),
        ("docker0", Kind.VIRTUAL),
        ("veth12ab", Kind.VIRTUAL),
        ("virbr0", Kind.VIRTUAL),
        ("vnet0", Kind.VIRTUAL),
        ("br0", Kind.ETHERNET),
        ("bond0", Kind.ETHERNET),
        ("eth0.7", Kind.ETHERNET),
        ("cni0", Kind.VIRTUAL),
        ("dummy0", Kind.VIRTUAL),
        ("tailscale0", Kind.OVERLAY),
        ("wg0", Kind.OVERLAY),
        ("home", Kind.OVERLAY),
        ("ztabcdef12", Kind.OVERLAY),
        ("tun0", Kind.OVERLAY),
        ("flannel.1", Kind.OVERLAY),
        ("gre1", Kind.OVERLAY),
        ("loop", Kind.VIRTUAL),
        ("never-seen", Kind.UNKNOWN),
    ],
)
def test_linux(name: str, kind: Kind) -> None:
    assert linux_kind(name, LINUX) is kind


def test_linux_facts_are_read_from_sys(tmp_path: Path) -> None:
    """A recorded piece of /sys/class/net: a card, a bridge over it, a tap and a wireless card."""
    drivers = tmp_path / "drivers"
    (drivers / "igc").mkdir(parents=True)
    net = tmp_path / "net"
    for name in ("enp3s0", "br0", "vnet0", "wlp4s0"):
        (net / name).mkdir(parents=True)
        (net / name / "type").write_text("1\n")
        (net / name / "uevent").write_text(f"INTERFACE={name}\nIFINDEX=2\n")
    (net / "bonding_masters").write_text("\n")
    (net / "enp3s0" / "device").mkdir()
    (net / "enp3s0" / "device" / "driver").symlink_to(drivers / "igc")
    (net / "br0" / "uevent").write_text("DEVTYPE=bridge\nINTERFACE=br0\nIFINDEX=3\n")
    (net / "br0" / "lower_enp3s0").symlink_to(net / "enp3s0")
    (net / "vnet0" / "tun_flags").write_text("0x1002\n")
    (net / "wlp4s0" / "phy80211").mkdir()
    assert read_linux_facts(tmp_path / "nowhere") == {}
    assert read_linux_facts(net) == {
        "enp3s0": LinuxFacts(driver="igc", has_device=True),
        "br0": LinuxFacts(devtype="bridge", lower=("enp3s0",)),
        "vnet0": LinuxFacts(tun_flags=0x1002),
        "wlp4s0": LinuxFacts(is_wireless=True),
    }
