"""What a node says of itself: memory, backends and addresses."""

import psutil
import pytest

from services.common.addresses import HostPort
from services.topology.agent.identity import Identity
from services.topology.agent.interfaces import InterfaceReader, advertised_hosts
from services.topology.agent.report import MemoryRules, Reporter, available_bytes
from services.topology.domain.model import Interface, InterfaceKind
from services.topology.domain.rules import check_node

LO = Interface("lo", InterfaceKind.VIRTUAL, ("127.0.0.1", "::1"))
INTERFACES = (
    Interface("docker0", InterfaceKind.VIRTUAL, ("172.17.0.1",)),
    Interface("en0", InterfaceKind.ETHERNET, ("fd00::1", "10.0.0.1")),
    Interface("en1", InterfaceKind.WIFI, ("10.1.0.1",)),
    Interface("en2", InterfaceKind.THUNDERBOLT, ("169.254.3.1",)),
    LO,
)
OUTWARD = ("169.254.3.1", "10.0.0.1", "fd00::1", "10.1.0.1", "172.17.0.1")


@pytest.mark.parametrize(
    ("listen", "lab", "hosts"),
    [
        ("0.0.0.0", False, OUTWARD),
        ("::", False, OUTWARD),
        ("0.0.0.0", True, (*OUTWARD, "127.0.0.1", "::1")),
        ("10.0.0.1", False, ("10.0.0.1",)),
        ("127.0.0.1", False, ("127.0.0.1",)),
        ("FD00::0:1", False, ("fd00::1",)),
    ],
)
def test_advertised_addresses(listen: str, lab: bool, hosts: tuple[str, ...]) -> None:
    assert advertised_hosts(listen, INTERFACES, lab=lab) == hosts


def test_a_machine_without_a_network_serves_itself() -> None:
    assert advertised_hosts("0.0.0.0", [LO], lab=False) == ("127.0.0.1", "::1")


def test_a_listening_name_is_looked_up() -> None:
    assert set(advertised_hosts("localhost", INTERFACES, lab=True)) <= {"127.0.0.1", "::1"}


@pytest.mark.parametrize(
    ("rules", "available"),
    [
        (MemoryRules(), 600),
        (MemoryRules(headroom_bytes=100), 500),
        (MemoryRules(headroom_bytes=700), 0),
        (MemoryRules(memory_bytes=800, headroom_bytes=100), 800),
        (MemoryRules(memory_bytes=5_000), 1_000),
        # Promised and not yet loaded, half loaded, loaded: each promised byte counts once.
        (MemoryRules(headroom_bytes=100, reserved_bytes=lambda: 200), 300),
        (MemoryRules(reserved_bytes=lambda: 200, loaded_bytes=lambda: 100), 500),
        (MemoryRules(reserved_bytes=lambda: 200, loaded_bytes=lambda: 200), 600),
        (MemoryRules(memory_bytes=300, reserved_bytes=lambda: 200), 100),
        (MemoryRules(memory_bytes=300, reserved_bytes=lambda: 400), 0),
    ],
)
def test_available_memory(rules: MemoryRules, available: int) -> None:
    assert available_bytes(total=1_000, free=600, rules=rules) == available


def test_this_machine_reports_itself() -> None:
    reporter = Reporter(
        Identity("a", 1_000),
        name="",
        listen=HostPort("127.0.0.1", 52420),
        memory=MemoryRules(memory_bytes=2**20),
        lab=True,
    )
    node = reporter.node()
    check_node(node)
    assert node.endpoints == (HostPort("127.0.0.1", 52420),)
    assert node.kind_of("127.0.0.1") is InterfaceKind.VIRTUAL
    assert node.memory_total_bytes == psutil.virtual_memory().total
    assert node.memory_available_bytes == 2**20
    assert node.name


def test_link_local_ipv6_addresses_are_left_out() -> None:
    addresses = [a for interface in InterfaceReader().read() for a in interface.addresses]
    assert "127.0.0.1" in addresses
    assert not [address for address in addresses if address.startswith("fe80")]
