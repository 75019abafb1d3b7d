"""Bad reports are refused with the field that is wrong."""

from dataclasses import replace

import pytest

from services.common.addresses import HostPort
from services.common.errors import Reason, ShardringError
from services.topology.domain import rules
from services.topology.domain.model import Backend, Interface, InterfaceKind, Link, Node, Speed
from tests.unit.topology.examples import link, node

GOOD = node()


def test_good_reports_pass() -> None:
    rules.check_node(GOOD)
    rules.check_node(replace(GOOD, endpoints=(HostPort("studio-1.local", 1),), backends=()))
    # A node that serves only its own machine, and a cable between two Macs.
    rules.check_node(replace(GOOD, endpoints=(HostPort("127.0.0.1", 1),)))
    rules.check_node(replace(GOOD, endpoints=(HostPort("169.254.7.1", 1),)))
    rules.check_links("a", [link("a", "b", "169.254.7.1"), link("a", "b", "fd00::7")], lab=False)
    rules.check_links("a", [link("a", "b", "127.0.0.1")], lab=True)


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        (replace(GOOD, node_id=""), "node.node_id"),
        (replace(GOOD, node_id="a b"), "node.node_id"),
        (replace(GOOD, node_id="a" * 65), "node.node_id"),
        (replace(GOOD, name=""), "node.name"),
        (replace(GOOD, name="a\nb"), "node.name"),
        (replace(GOOD, start_ns=0), "node.start_time"),
        (replace(GOOD, start_ns=-5), "node.start_time"),
        (replace(GOOD, start_ns=10**30), "node.start_time"),
        (replace(GOOD, endpoints=()), "node.endpoints"),
        (replace(GOOD, endpoints=(HostPort("10.0.0.1", 1),) * 65), "node.endpoints"),
        (replace(GOOD, endpoints=(HostPort("10.0.0.1", 0),)), "node.endpoints[0].port"),
        (replace(GOOD, endpoints=(HostPort("10.0.0.1", 70000),)), "node.endpoints[0].port"),
        (replace(GOOD, endpoints=(HostPort("0.0.0.0", 1),)), "node.endpoints[0].address"),
        (replace(GOOD, endpoints=(HostPort("::", 1),)), "node.endpoints[0].address"),
        (replace(GOOD, endpoints=(HostPort("224.0.0.1", 1),)), "node.endpoints[0].address"),
        (replace(GOOD, endpoints=(HostPort("fe80::1", 1),)), "node.endpoints[0].address"),
        (replace(GOOD, endpoints=(HostPort("[fd00::1]", 1),)), "node.endpoints[0].address"),
        (replace(GOOD, endpoints=(HostPort("10.0.0.300", 1),)), "node.endpoints[0].address"),
        (replace(GOOD, endpoints=(HostPort("fd00::1%\x1b[2J", 1),)), "node.endpoints[0].address"),
        (
            replace(GOOD, interfaces=(Interface("e", InterfaceKind.WIFI, ("::1%" + "z" * 99,)),)),
            "node.interfaces[0].addresses",
        ),
        (
            replace(GOOD, interfaces=(Interface("en0", InterfaceKind.WIFI, ("10.0.0.1/24",)),)),
            "node.interfaces[0].addresses",
        ),
        (
            replace(GOOD, interfaces=(Interface("", InterfaceKind.WIFI, ()),)),
            "node.interfaces[0].name",
        ),
        (
            replace(GOOD, interfaces=(Interface("en0", InterfaceKind.WIFI, ()),) * 129),
            "node.interfaces",
        ),
        (replace(GOOD, memory_total_bytes=-1), "node.memory_total_bytes"),
        (replace(GOOD, memory_total_bytes=2**60), "node.memory_total_bytes"),
        (replace(GOOD, memory_available_bytes=-1), "node.memory_available_bytes"),
        (replace(GOOD, memory_available_bytes=17 * 2**30), "node.memory_available_bytes"),
        (replace(GOOD, backends=(Backend.CPU,) * 17), "node.backends"),
        (replace(GOOD, speed=Speed(-1, 1)), "node.weight_bytes_per_second"),
        (replace(GOOD, speed=Speed(10**17, 1)), "node.weight_bytes_per_second"),
        (replace(GOOD, speed=Speed(1, -1)), "node.multiply_adds_per_second"),
        (replace(GOOD, speed=Speed(1, 2 * 10**18)), "node.multiply_adds_per_second"),
        (replace(GOOD, speed=Speed(0, 1)), "node.multiply_adds_per_second"),
        (replace(GOOD, speed=Speed(1, 0)), "node.multiply_adds_per_second"),
    ],
)
def test_bad_nodes(bad: Node, field: str) -> None:
    with pytest.raises(ShardringError) as caught:
        rules.check_node(bad)
    assert caught.value.reason is Reason.INVALID_FIELD
    assert caught.value.metadata["field"] == field


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        (link("b", "c", "10.0.0.3"), "links[0].source_node_id"),
        (link("a", "a", "10.0.0.1"), "links[0].sink_node_id"),
        (link("a", "", "10.0.0.1"), "links[0].sink_node_id"),
        (link("a", "b", ""), "links[0].sink_address"),
        (link("a", "b", "studio-1.local"), "links[0].sink_address"),
        (link("a", "b", "127.0.0.1"), "links[0].sink_address"),
        (link("a", "b", "::1"), "links[0].sink_address"),
        (link("a", "b", "0.0.0.0"), "links[0].sink_address"),
        (link("a", "b", "ff02::1"), "links[0].sink_address"),
        (link("a", "b", "fe80::1"), "links[0].sink_address"),
        (link("a", "b", "10.0.0.2", -1), "links[0].round_trip"),
        (link("a", "b", "10.0.0.2", 61 * 10**9), "links[0].round_trip"),
    ],
)
def test_bad_links(bad: Link, field: str) -> None:
    with pytest.raises(ShardringError) as caught:
        rules.check_links("a", [bad], lab=False)
    assert caught.value.reason is Reason.INVALID_FIELD
    assert caught.value.metadata["field"] == field


def test_lab_mode_admits_loopback_and_nothing_else() -> None:
    for address in ("0.0.0.0", "224.0.0.1", "255.255.255.255", "::"):
        with pytest.raises(ShardringError):
            rules.check_links("a", [link("a", "b", address)], lab=True)


def test_a_link_is_listed_once_and_lists_are_bounded() -> None:
    with pytest.raises(ShardringError, match="each link once"):
        rules.check_links("a", [link("a", "b", "10.0.0.2")] * 2, lab=False)
    with pytest.raises(ShardringError, match="at most 16384"):
        rules.check_links("a", [link("a", "b", "10.0.0.2")] * 16_385, lab=False)
