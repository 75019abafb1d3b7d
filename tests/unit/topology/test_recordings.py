"""Kinds of interfaces, Thunderbolt ports and RDMA, from recordings of several machines."""

import threading
from pathlib import Path

import pytest

from services.topology.agent.hardware import Hardware, HardwareReader, described
from services.topology.agent.kinds_linux import linux_kind, read_linux_facts
from services.topology.agent.kinds_macos import (
    macos_kind,
    parse_bridge_members,
    parse_hardware_ports,
)
from services.topology.agent.rdma import (
    macos_rdma,
    parse_ibv_devices,
    parse_rdma_status,
    read_linux_rdma,
)
from services.topology.agent.thunderbolt import macos_ports, parse_thunderbolt, read_linux_ports
from services.topology.domain.model import Interface, Rdma, RdmaDevice, ThunderboltPort
from services.topology.domain.model import InterfaceKind as Kind
from tests.contract.topology_lab import eventually
from tests.unit.topology.recorded import linux_root, text

MINI, BOOK, STUDIO = "mac-mini-m4", "macbook-pro-m4-max", "mac-studio-m3-ultra"


def domain(machine: int, port: int) -> str:
    """Return the identity of a port in the recordings: 1 the mini, 2 the MacBook, 3 the Studio."""
    return f"{machine:08d}-0000-4000-8000-{port:012d}"


def mac_kinds(name: str) -> dict[str, Kind]:
    ports = parse_hardware_ports(text(f"{name}.networksetup.txt"))
    members = parse_bridge_members(text(f"{name}.ifconfig.txt"))
    more = ("lo0", "anpi0", "utun3", "utun4", "bridge100", "bridge101", "awdl0", "vmenet0")
    return {device: macos_kind(device, ports, members) for device in (*ports, *more)}


def ports_of(name: str) -> tuple[ThunderboltPort, ...]:
    return macos_ports(
        parse_thunderbolt(text(f"{name}.thunderbolt.json")),
        parse_hardware_ports(text(f"{name}.networksetup.txt")),
        parse_bridge_members(text(f"{name}.ifconfig.txt")),
    )


@pytest.mark.parametrize(
    ("machine", "kinds"),
    [
        (
            MINI,
            {
                "en0": Kind.ETHERNET,
                "en1": Kind.WIFI,
                "en2": Kind.THUNDERBOLT,
                "en4": Kind.THUNDERBOLT,
                "bridge0": Kind.THUNDERBOLT,
                "en5": Kind.MAYBE_ETHERNET,
                "lo0": Kind.VIRTUAL,
                "anpi0": Kind.VIRTUAL,
                "awdl0": Kind.VIRTUAL,
                "utun4": Kind.OVERLAY,
            },
        ),
        (
            BOOK,
            {
                "en0": Kind.WIFI,
                "en1": Kind.THUNDERBOLT,
                "en8": Kind.MAYBE_ETHERNET,  # a USB adapter
                "en9": Kind.MAYBE_ETHERNET,  # an adapter at a Thunderbolt port
                "en10": Kind.UNKNOWN,  # a telephone
                "bridge100": Kind.VIRTUAL,  # shared with virtual machines
                "bridge101": Kind.MAYBE_ETHERNET,  # virtual machines bridged to the adapter
                "vmenet0": Kind.VIRTUAL,
            },
        ),
        (
            STUDIO,
            {
                "en0": Kind.ETHERNET,
                "en1": Kind.WIFI,
                "en7": Kind.THUNDERBOLT,
                "en8": Kind.MAYBE_ETHERNET,
                "en11": Kind.UNKNOWN,
                "bridge0": Kind.THUNDERBOLT,
            },
        ),
    ],
)
def test_kinds_on_macs(machine: str, kinds: dict[str, Kind]) -> None:
    found = mac_kinds(machine)
    assert {name: found[name] for name in kinds} == kinds


@pytest.mark.parametrize(
    ("machine", "kinds"),
    [
        (
            "linux-desktop",
            {
                "lo": Kind.VIRTUAL,
                "enp5s0": Kind.ETHERNET,
                "wlp4s0": Kind.WIFI,
                "enx00e04c680001": Kind.ETHERNET,
                "thunderbolt0": Kind.THUNDERBOLT,
                "virbr0": Kind.VIRTUAL,
                "tailscale0": Kind.OVERLAY,
                "wg0": Kind.OVERLAY,
                "ztks5abcde": Kind.OVERLAY,
            },
        ),
        (
            "linux-server-bond",
            {
                "lo": Kind.VIRTUAL,
                "eno1": Kind.ETHERNET,
                "eno2": Kind.ETHERNET,
                "bond0": Kind.ETHERNET,
                "bond0.40": Kind.ETHERNET,
                "br40": Kind.ETHERNET,
                "vnet3": Kind.VIRTUAL,
                "ens5np0": Kind.ETHERNET,
            },
        ),
        (
            "linux-docker-host",
            {
                "lo": Kind.VIRTUAL,
                "eth0": Kind.ETHERNET,
                "docker0": Kind.VIRTUAL,
                "veth1a2b3c4": Kind.VIRTUAL,
                "br-0123456789ab": Kind.VIRTUAL,
                "veth5d6e7f8": Kind.VIRTUAL,
                "podman0": Kind.VIRTUAL,
                "cni0": Kind.VIRTUAL,
                "flannel.1": Kind.OVERLAY,
            },
        ),
        ("linux-container", {"lo": Kind.VIRTUAL, "eth0": Kind.VIRTUAL}),
        (
            "linux-raspberry-pi",
            {"lo": Kind.VIRTUAL, "eth0": Kind.ETHERNET, "wlan0": Kind.WIFI},
        ),
    ],
)
def test_kinds_on_linux(machine: str, kinds: dict[str, Kind], tmp_path: Path) -> None:
    facts = read_linux_facts(linux_root(machine, tmp_path) / "sys/class/net")
    assert {name: linux_kind(name, facts) for name in facts} == kinds


def test_bridges_are_read_with_their_members_unless_they_are_down() -> None:
    assert parse_bridge_members(text(f"{MINI}.ifconfig.txt")) == {"bridge0": ("en2", "en3", "en4")}
    # This one's Thunderbolt bridge is switched off.
    assert parse_bridge_members(text(f"{BOOK}.ifconfig.txt")) == {
        "bridge100": ("vmenet0",),
        "bridge101": ("en8", "vmenet0"),
    }


def test_thunderbolt_4_ports_with_a_cable_to_another_machine() -> None:
    cabled, idle, _ = ports_of(MINI)
    assert cabled == ThunderboltPort(
        "en2", domain(1, 1), (domain(3, 1),), 40_000_000_000, 4, "bridge0"
    )
    assert idle == ThunderboltPort("en3", domain(1, 2), (), 40_000_000_000, 4, "bridge0")


def test_thunderbolt_5_ports_and_peers_behind_hubs() -> None:
    direct, behind_hubs, idle = ports_of(BOOK)
    assert direct == ThunderboltPort("en1", domain(2, 1), (domain(3, 2),), 80_000_000_000, 5)
    # A hub behind a hub, beside a display; the hubs slow the link down to Thunderbolt 4.
    assert behind_hubs == ThunderboltPort("en2", domain(2, 2), (domain(3, 5),), 40_000_000_000, 4)
    assert (idle.generation, idle.peer_domains) == (5, ())


def test_a_drive_is_no_peer() -> None:
    by_interface = {port.interface: port for port in ports_of(STUDIO)}
    assert by_interface["en5"].peer_domains == ()
    assert by_interface["en6"].peer_domains == (domain(2, 2),)


@pytest.mark.parametrize("bad", ["", "nonsense", "[]", "{}", '{"SPThunderboltDataType": 7}'])
def test_a_listing_that_is_none_is_refused(bad: str) -> None:
    with pytest.raises(ValueError, match=r"SPThunderboltDataType|Expecting value"):
        parse_thunderbolt(bad)


def test_odd_entries_of_a_listing_do_no_harm() -> None:
    odd = (
        '{"SPThunderboltDataType": [7, {}, {"receptacle_1_tag": {}, "_items": [1, {"_items": 2}]}]}'
    )
    (port,) = parse_thunderbolt(odd)
    assert (port.link_bits_per_second, port.generation, port.peer_domains) == (0, 0, ())


def test_rdma_devices_are_those_of_unbridged_thunderbolt_5_ports() -> None:
    names = parse_ibv_devices(text(f"{STUDIO}.ibv_devices.txt"))
    assert names == tuple(f"rdma_en{number}" for number in range(2, 8))
    rdma = macos_rdma(True, names, ports_of(STUDIO))
    # en2 runs at Thunderbolt 4 and is bridged; so is en4; en5 is bridged; en6 has slow hubs.
    assert rdma == Rdma(True, (RdmaDevice("rdma_en3", "en3"), RdmaDevice("rdma_en7", "en7")))
    assert macos_rdma(True, names, ports_of(MINI)).devices == ()
    # What is known of no port may be anything.
    assert macos_rdma(False, ["rdma_en2", "mlx5_0"], ()) == Rdma(False, (RdmaDevice("mlx5_0"),))


@pytest.mark.parametrize(
    ("status", "enabled"),
    [
        ("enabled\n", True),
        ("RDMA is enabled.\n", True),
        ("disabled\n", False),
        ("not enabled\n", False),
        ("", False),
    ],
)
def test_whether_rdma_is_switched_on(status: str, enabled: bool) -> None:
    assert parse_rdma_status(status) is enabled


def test_a_list_without_devices() -> None:
    assert parse_ibv_devices("    device          \t   node GUID\n    ------  \t----------\n") == ()


def test_linux_ports_and_rdma(tmp_path: Path) -> None:
    desktop = linux_root("linux-desktop", tmp_path / "desktop") / "sys"
    assert read_linux_ports(desktop) == (
        ThunderboltPort(
            "thunderbolt0",
            "c4010000-0000-0018-0000-000000000001",
            ("c4010000-0000-0018-0000-000000000002",),
            40_000_000_000,
            4,
        ),
    )
    bridge = desktop / "class/net/virbr0"
    (bridge / "bridge").mkdir()
    (desktop / "class/net/thunderbolt0/master").symlink_to(bridge)
    assert read_linux_ports(desktop)[0].bridge == "virbr0"
    assert read_linux_rdma(desktop / "class/infiniband") == Rdma()
    server = linux_root("linux-server-bond", tmp_path / "server") / "sys"
    assert read_linux_ports(server) == ()
    assert read_linux_rdma(server / "class/infiniband") == Rdma(
        True, (RdmaDevice("mlx5_0", "ens5np0"),)
    )


async def test_hardware_is_read_in_the_background_once_and_when_interfaces_differ() -> None:
    asked: list[None] = []
    release = threading.Event()

    def slowly() -> Hardware:
        asked.append(None)
        release.wait(20)
        return Hardware(rdma=Rdma(enabled=True))

    reader, interfaces = HardwareReader(slowly), (Interface("en0", Kind.ETHERNET, ("10.0.0.1",)),)
    # Not waited for, however long it takes, and not begun twice.
    assert reader.latest(interfaces) == reader.latest(interfaces) == Hardware()
    release.set()

    async def there() -> bool:
        return reader.latest(interfaces).rdma.enabled

    await eventually(there)
    assert len(asked) == 1

    async def again() -> bool:
        reader.latest(())
        return len(asked) == 2

    await eventually(again)


def test_cabling_in_words() -> None:
    hardware = Hardware(ports_of(MINI)[:2], Rdma(False))
    assert described(hardware) == (
        "en2 Thunderbolt 4, cabled to a machine, in bridge0; en3 Thunderbolt 4, in bridge0; "
        "RDMA off (no device)"
    )
