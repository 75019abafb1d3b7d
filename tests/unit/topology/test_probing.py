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
    after_burst,
    links_of,
    misdirections_of,
    next_burst,
    retargeted,
)
from services.topology.domain.model import Interface, InterfaceKind, Link, Misdirection
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
    assert misdirections_of("a", {TARGET: known}) == (
        Misdirection("a", "b", "c", "10.0.0.2", 52420),
    )
    for after_that in (Answered(7), Silent("refused")):
        assert misdirections_of("a", {TARGET: after_all(known, after_that)}) == ()
    unproven = after_all(VERIFIED, AnsweredByOther(""))
    assert [found.answered for found in misdirections_of("a", {TARGET: unproven})] == [""]


def test_the_fastest_of_the_last_eight_round_trips_counts() -> None:
    known = after_all(FRESH, Answered(1_000), *[Answered(n) for n in range(9_000, 2_000, -1_000)])
    assert links_of("a", {TARGET: known}, now=0)[0].round_trip_ns == 1_000
    known = after_all(known, Answered(9_000))
    (link,) = links_of("a", {TARGET: known}, now=0)
    assert link.round_trip_ns == 3_000
    # Of 3 to 9 and once more 9 thousand.
    assert link.round_trip_median_ns == 6_000


def test_only_verified_targets_are_links_in_order() -> None:
    table = {
        Target("c", HostPort("10.0.0.3", 1)): VERIFIED,
        TARGET: VERIFIED,
        Target("b", HostPort("10.9.0.2", 1)): FRESH,
    }
    kind = InterfaceKind.ETHERNET
    assert links_of("a", table, now=0) == (
        Link("a", "b", "10.0.0.2", kind, 5_000, 5_000, sink_port=52420),
        Link("a", "c", "10.0.0.3", kind, 5_000, 5_000, sink_port=1),
    )


def test_two_ports_of_one_address_are_one_link() -> None:
    slower = after_all(FRESH, Answered(9_000))
    table = {TARGET: VERIFIED, Target("b", HostPort("10.0.0.2", 1)): slower}
    assert [link.round_trip_ns for link in links_of("a", table, now=0)] == [5_000]


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
    assert links_of("a", table, now=0) == ()


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


def measured(probed: Probed, bytes_per_second: int = 1_000, now: float = 100) -> Probed:
    return after_burst(probed, bytes_per_second, now, wait_seconds=600)


def throughput(probed: Probed, now: float) -> int | None:
    (link,) = links_of("a", {TARGET: probed}, now)
    return None if link.throughput is None else link.throughput.bytes_per_second


def test_a_link_is_measured_when_it_appears_and_seldom_afterwards() -> None:
    assert next_burst({TARGET: FRESH}) == (None, 0.0)
    assert next_burst({TARGET: VERIFIED}) == (TARGET, 0.0)
    known = after_all(measured(VERIFIED), *[Answered(5_000)] * 20)
    assert next_burst({TARGET: known}) == (TARGET, 700)
    # Another one that is due earlier goes first.
    other = Target("c", HostPort("10.0.0.3", 1))
    assert next_burst({TARGET: known, other: measured(VERIFIED, now=50)}) == (other, 650)


def test_a_throughput_counts_for_fifteen_minutes() -> None:
    known = measured(VERIFIED)
    assert [throughput(known, now) for now in (100, 1_000, 1_000.1)] == [1_000, 1_000, None]


def test_a_link_that_was_lost_is_measured_anew() -> None:
    miss = Silent("no route")
    known = after_all(measured(VERIFIED), miss, miss, Answered(5_000))
    assert (known.burst_due, throughput(known, 100)) == (700, 1_000)
    known = after_all(measured(VERIFIED), miss, miss, miss, Answered(5_000))
    assert (known.burst_due, throughput(known, 100)) == (100, None)


def test_a_way_by_another_interface_is_measured_anew() -> None:
    known = measured(after_all(FRESH, Answered(5_000, "en0")))
    assert after_all(known, Answered(5_000, "en0")) == replace(known, round_trips_ns=(5_000, 5_000))
    # Where it can't be told, it's as before.
    assert after_all(known, Answered(5_000)).source_interface == "en0"
    moved = after_all(known, Answered(5_000, "en7"))
    assert (moved.source_interface, moved.burst_due) == ("en7", 100)
    assert throughput(moved, 100) is None


def test_round_trips_that_all_differ_a_lot_ask_for_a_new_measurement() -> None:
    slow, fast = 9_000_000, 2_000_000
    known = measured(after_all(FRESH, *[Answered(fast)] * 8))
    assert after_all(known, *[Answered(slow)] * 7).burst_due == 700
    slowed = after_all(known, *[Answered(slow)] * 8)
    assert slowed.burst_due == 100
    # Until then, the last figure stands.
    assert throughput(slowed, 100) == 1_000
    again = measured(slowed, 10)
    assert after_all(again, *[Answered(slow)] * 8).burst_due == 700
    assert after_all(again, *[Answered(fast)] * 8).burst_due == 100
    # Below a millisecond it is jitter.
    tiny = measured(after_all(FRESH, *[Answered(10_000)] * 8))
    assert after_all(tiny, *[Answered(900_000)] * 8).burst_due == 700
