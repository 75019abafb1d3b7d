"""Which addresses are probed, when, and what follows from the answers."""

from dataclasses import replace

import pytest

from services.common.addresses import HostPort
from services.topology.agent.probing import (
    Answered,
    AnsweredByOther,
    Probed,
    Silent,
    Target,
    after,
    links_of,
    retargeted,
)
from services.topology.domain.model import Interface, InterfaceKind, Link
from tests.unit.topology.examples import node

OWN = node("a", "10.0.0.1")
PEER = node("b", "10.0.0.2")
TARGET = Target("b", HostPort("10.0.0.2", 52420))
FRESH = Probed(InterfaceKind.ETHERNET, PEER.start_ns, due=0)
INTERVAL = 3.0


def after_all(probed: Probed, *outcomes: Answered | AnsweredByOther | Silent) -> Probed:
    for outcome in outcomes:
        probed = after(probed, outcome, now=100, interval=INTERVAL)
    return probed


VERIFIED = after_all(FRESH, Answered(5_000))


def test_one_good_probe_verifies() -> None:
    assert VERIFIED.verified
    assert VERIFIED.due == 100 + 2 * INTERVAL


def test_a_link_goes_after_three_misses_in_a_row() -> None:
    miss = Silent("no route")
    assert after_all(VERIFIED, miss, miss).verified
    assert not after_all(VERIFIED, miss, miss, miss).verified
    # An answer in between starts the count anew; one good probe brings the link back.
    assert after_all(VERIFIED, miss, miss, Answered(1), miss, miss).verified
    assert after_all(VERIFIED, miss, miss, miss, Answered(1)).verified


def test_silent_addresses_are_asked_more_seldom() -> None:
    miss = Silent("refused")
    assert after_all(FRESH, miss, miss).due == 100 + INTERVAL
    assert after_all(FRESH, miss, miss, miss).due == 100 + 5 * INTERVAL


def test_another_node_at_the_address_ends_the_link_at_once() -> None:
    known = after_all(VERIFIED, AnsweredByOther("c"))
    assert not known.verified
    assert known.other == "c"
    assert after_all(known, Answered(7)).other is None


def test_the_fastest_of_the_last_eight_round_trips_counts() -> None:
    known = after_all(FRESH, Answered(1_000), *[Answered(n) for n in range(9_000, 2_000, -1_000)])
    assert links_of("a", {TARGET: known})[0].round_trip_ns == 1_000
    known = after_all(known, Answered(9_000))
    assert links_of("a", {TARGET: known})[0].round_trip_ns == 3_000


def test_only_verified_targets_are_links_in_order() -> None:
    table = {
        Target("c", HostPort("10.0.0.3", 1)): VERIFIED,
        TARGET: VERIFIED,
        Target("b", HostPort("10.9.0.2", 1)): FRESH,
    }
    kind = InterfaceKind.ETHERNET
    assert links_of("a", table) == (
        Link("a", "b", "10.0.0.2", kind, 5_000),
        Link("a", "c", "10.0.0.3", kind, 5_000),
    )


def test_two_ports_of_one_address_are_one_link() -> None:
    slower = after_all(FRESH, Answered(9_000))
    table = {TARGET: VERIFIED, Target("b", HostPort("10.0.0.2", 1)): slower}
    assert [link.round_trip_ns for link in links_of("a", table)] == [5_000]


def test_new_peers_are_due_at_once_and_what_is_known_stays() -> None:
    other = node("c", "10.0.0.3")
    table = retargeted({TARGET: VERIFIED}, OWN, [OWN, PEER, other], now=101, lab=False)
    assert table[TARGET] == VERIFIED
    assert table[Target("c", HostPort("10.0.0.3", 52420))].due == 101
    assert len(table) == 2


def test_what_is_no_longer_advertised_goes() -> None:
    assert retargeted({TARGET: VERIFIED}, OWN, [], now=0, lab=False) == {}
    moved = node("b", "10.0.0.2", port=7)
    table = retargeted({TARGET: VERIFIED}, OWN, [moved], now=0, lab=False)
    assert links_of("a", table) == ()


def test_a_peer_that_started_anew_is_probed_at_once_without_losing_its_link() -> None:
    again = replace(PEER, start_ns=2_000)
    table = retargeted({TARGET: VERIFIED}, OWN, [again], now=50, lab=False)
    assert table[TARGET] == replace(VERIFIED, start_ns=2_000, due=50)


def test_the_kind_is_that_of_the_interface_with_the_address() -> None:
    wifi = Interface("en1", InterfaceKind.WIFI, ("10.0.0.2",))
    table = retargeted({TARGET: VERIFIED}, OWN, [replace(PEER, interfaces=(wifi,))], 0, lab=False)
    assert table[TARGET].kind is InterfaceKind.WIFI
    table = retargeted({}, OWN, [replace(PEER, interfaces=())], 0, lab=False)
    assert table[TARGET].kind is InterfaceKind.UNKNOWN


@pytest.mark.parametrize(
    ("address", "lab", "probed"),
    [
        ("10.0.0.2", False, True),
        ("fd00::2", False, True),
        ("127.0.0.1", False, False),
        ("127.0.0.1", True, True),
        ("::1", False, False),
        ("0.0.0.0", True, False),
        ("224.0.0.1", True, False),
        ("fe80::1", True, False),
        ("studio-2.local", False, False),
    ],
)
def test_which_addresses_are_probed(address: str, lab: bool, probed: bool) -> None:
    assert bool(retargeted({}, OWN, [node("b", address)], 0, lab=lab)) is probed


def test_a_bridge_with_the_same_address_everywhere_is_no_target() -> None:
    bridge = HostPort("172.17.0.1", 52420)
    own = replace(OWN, endpoints=(*OWN.endpoints, bridge))
    peer = replace(PEER, endpoints=(*PEER.endpoints, bridge))
    assert list(retargeted({}, own, [peer], 0, lab=False)) == [TARGET]
    # On another port of a shared address it may well be the peer: the probe decides.
    peer = replace(PEER, endpoints=(HostPort("172.17.0.1", 7),))
    assert list(retargeted({}, own, [peer], 0, lab=False)) == [Target("b", peer.endpoints[0])]
