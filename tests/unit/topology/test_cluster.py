"""Leases, revisions and duplicates: what reports do to the topology."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from services.common.addresses import HostPort
from services.common.errors import Reason, ShardringError
from services.topology.domain.cluster import Cluster
from services.topology.domain.model import Change, Link, Misdirection, Node, Throughput
from tests.unit.topology.examples import GIB, link, node

A = node("a", "10.0.0.1")
B = node("b", "10.0.0.2")
C = node("c", "10.0.0.3")
A_TO_B, B_TO_A = link("a", "b", "10.0.0.2"), link("b", "a", "10.0.0.1")


@pytest.fixture
def cluster() -> Cluster:
    return Cluster(first_revision=100, lease_seconds=9, now=0)


@pytest.fixture
def pair(cluster: Cluster) -> Cluster:
    """Two nodes, linked both ways, at revision 104."""
    cluster.report_node(A, 0)
    cluster.report_node(B, 0)
    cluster.report_links("a", A.start_ns, [A_TO_B])
    cluster.report_links("b", B.start_ns, [B_TO_A])
    return cluster


def links(cluster: Cluster) -> list[Link]:
    return list(cluster.topology().links)


def refused(reason: Reason) -> "pytest.RaisesExc[ShardringError]":
    return pytest.RaisesExc(ShardringError, check=lambda error: error.reason is reason)


def test_each_change_is_one_revision(pair: Cluster) -> None:
    assert pair.revision == 104
    assert pair.topology().nodes == (A, B)
    assert links(pair) == [A_TO_B, B_TO_A]


def test_a_heartbeat_that_changes_nothing_keeps_the_revision(pair: Cluster) -> None:
    assert pair.report_node(A, 3) is None
    assert pair.report_links("a", A.start_ns, [A_TO_B]) is None
    assert pair.revision == 104


def test_drifting_memory_is_served_at_once_and_announced_after_a_step(cluster: Cluster) -> None:
    cluster.report_node(A, 0)
    announced = cluster.revision
    step = int(0.01 * A.memory_total_bytes)
    for drift in (step // 2, step):
        drifted = node("a", memory_available_bytes=8 * GIB - drift)
        assert cluster.report_node(drifted, 1) is None
        assert cluster.topology().nodes == (drifted,)
    # Each report is a small step from the last one, but together they are worth telling.
    change = cluster.report_node(node("a", memory_available_bytes=8 * GIB - step - 2), 1)
    assert change is not None
    assert cluster.revision == announced + 1


def test_a_small_machine_has_a_step_of_64_mib(cluster: Cluster) -> None:
    small = node("a", memory_total_bytes=GIB, memory_available_bytes=GIB)
    cluster.report_node(small, 0)
    within = replace(small, memory_available_bytes=GIB - 64 * 2**20)
    assert cluster.report_node(within, 1) is None
    beyond = replace(small, memory_available_bytes=GIB - 64 * 2**20 - 1)
    assert cluster.report_node(beyond, 1) is not None


def test_drifting_round_trips_are_served_at_once_and_announced_after_a_step(pair: Cluster) -> None:
    near, far = link("a", "b", "10.0.0.2", 1_900_000), link("a", "b", "10.0.0.2", 2_100_000)
    assert pair.report_links("a", None, [near]) is None
    assert links(pair) == [near, B_TO_A]
    change = pair.report_links("a", None, [far])
    assert change == Change(relinked=("a",), links=(far,), gathering=True)


def test_three_missed_heartbeats_take_node_and_links_in_one_revision(pair: Cluster) -> None:
    pair.expire(9 - 0.001)
    assert pair.revision == 104
    pair.report_node(B, 8)
    change = pair.expire(9)
    assert change == Change(removed=("a",), gathering=False)
    assert pair.revision == 105
    assert pair.topology().nodes == (B,)
    assert links(pair) == []


def test_a_node_that_comes_back_is_linked_only_when_verified_anew(pair: Cluster) -> None:
    pair.remove_node("a")
    pair.report_node(A, 1)
    assert links(pair) == []
    pair.report_links("b", B.start_ns, [B_TO_A])
    assert links(pair) == [B_TO_A]


def test_removed_links_are_not_announced_twice(pair: Cluster) -> None:
    pair.remove_node("a")
    # What b reports now is what watchers already made of the removal.
    assert pair.report_links("b", B.start_ns, []) is None


def test_gathering_ends_after_one_lease_as_a_change(cluster: Cluster) -> None:
    assert cluster.topology().gathering
    assert cluster.expire(8.9) is None
    assert cluster.expire(9) == Change(gathering=False)
    assert (cluster.revision, cluster.topology().gathering) == (101, False)
    assert cluster.next_expiry() is None


def test_next_expiry_is_the_first_lease_to_end(pair: Cluster) -> None:
    pair.expire(9 - 0.001)
    pair.report_node(A, 5)
    pair.report_node(B, 7)
    pair.expire(9)
    assert pair.next_expiry() == 14


def test_links_to_nodes_that_are_not_there_yet_show_when_they_come(cluster: Cluster) -> None:
    cluster.report_node(A, 0)
    told = cluster.report_links("a", A.start_ns, [A_TO_B, link("a", "c", "10.0.0.3")])
    assert told == Change(gathering=True)
    assert links(cluster) == []
    change = cluster.report_node(B, 1)
    assert change == Change(
        (B,),
        (),
        ("a",),
        (A_TO_B,),
        gathering=True,
        one_way=frozenset({("a", "b")}),
        probing=("b",),
    )
    # c comes, but advertises another address than the one reported.
    cluster.report_node(node("c", "10.9.9.9"), 1)
    assert links(cluster) == [A_TO_B]


def test_a_restarted_node_takes_its_place_at_once(pair: Cluster) -> None:
    again = node("a", "10.0.0.1", start_ns=2_000)
    change = pair.report_node(again, 1)
    # What the run before had verified goes; what others verified at the same address stays.
    assert change == Change(updated=(again,), relinked=("a",), gathering=True, probing=("a",))
    assert links(pair) == [B_TO_A]
    assert len(pair.topology().nodes) == 2


def test_links_go_with_the_address_or_port_they_end_at(pair: Cluster) -> None:
    pair.report_node(node("a", "10.0.0.1", port=6000, start_ns=2_000), 1)
    assert links(pair) == []
    pair.report_links("b", None, [B_TO_A])
    moved = node("a", "10.0.0.77", port=6000, start_ns=2_000)
    change = pair.report_node(moved, 2)
    assert change == Change(updated=(moved,), relinked=("b",), gathering=True, probing=("a",))


def test_two_machines_with_one_id_are_both_named(pair: Cluster) -> None:
    clone = node("a", "10.0.0.4", name="clone", start_ns=500)
    with refused(Reason.NODE_ID_DUPLICATE) as caught:
        pair.report_node(clone, 1)
    assert caught.value.metadata == {
        "node_id": "a",
        "held_by": "studio-a (10.0.0.1:52420)",
        "claimed_by": "clone (10.0.0.4:52420)",
    }
    for name in ("studio-a (10.0.0.1:52420)", "clone (10.0.0.4:52420)"):
        assert name in caught.value.message
    assert pair.topology().nodes == (A, B)
    # The refused report renewed nothing, and once the holder is gone the place is free.
    pair.expire(9)
    assert pair.report_node(clone, 9) is not None


def test_the_older_of_two_live_runs_cannot_report_links(pair: Cluster) -> None:
    pair.report_node(node("a", "10.0.0.1", start_ns=2_000), 1)
    with refused(Reason.NODE_ID_DUPLICATE):
        pair.report_links("a", A.start_ns, [A_TO_B])
    assert links(pair) == [B_TO_A]


def test_only_live_nodes_report_links_and_can_be_removed(cluster: Cluster) -> None:
    with refused(Reason.NODE_NOT_FOUND):
        cluster.report_links("a", None, [])
    with refused(Reason.NODE_NOT_FOUND):
        cluster.remove_node("a")
    assert cluster.revision == 100


def test_a_bad_link_report_leaves_what_was(pair: Cluster) -> None:
    with refused(Reason.INVALID_FIELD) as caught:
        pair.report_links("a", None, [link("a", "b", "10.0.0.99")])
    assert caught.value.metadata["field"] == "links[0].sink_address"
    assert links(pair) == [A_TO_B, B_TO_A]


def test_following_the_changes_gives_the_same_topology(cluster: Cluster) -> None:
    """Apply changes as the proto says and compare with the snapshot, through a busy history."""
    nodes: dict[str, Node] = {}
    seen: dict[str, tuple[Link, ...]] = {}
    moved_b = node("b", "10.0.0.20")
    history: list[Callable[[], Change | None]] = [
        lambda: cluster.report_node(A, 0),
        lambda: cluster.report_links("a", None, [A_TO_B, link("a", "c", "10.0.0.3")]),
        lambda: cluster.report_node(B, 0),
        lambda: cluster.report_node(C, 1),
        lambda: cluster.report_links("c", None, [link("c", "b", "10.0.0.2")]),
        lambda: cluster.report_links("b", None, [B_TO_A]),
        lambda: cluster.report_node(moved_b, 2),
        lambda: cluster.report_links("a", None, [link("a", "b", "10.0.0.20")]),
        lambda: cluster.remove_node("c"),
        lambda: cluster.report_node(node("a", "10.0.0.1", start_ns=5_000), 3),
        lambda: cluster.report_links("a", None, [link("a", "b", "10.0.0.20")]),
        lambda: cluster.expire(11),
    ]
    for step in history:
        before = cluster.revision
        told = step()
        assert cluster.revision == before + (told is not None)
        change = told or Change()
        for updated in change.updated:
            nodes[updated.node_id] = updated
        for removed in change.removed:
            del nodes[removed]
            seen.pop(removed, None)
            seen = {s: tuple(k for k in kept if k.sink != removed) for s, kept in seen.items()}
        for source in change.relinked:
            seen[source] = tuple(k for k in change.links if k.source == source)
        current = cluster.topology()
        assert told is None or told.probing == current.probing
        assert tuple(nodes[node_id] for node_id in sorted(nodes)) == current.nodes
        assert tuple(k for source in sorted(seen) for k in seen[source]) == current.links


def test_a_link_without_its_counterpart_is_one_way_until_that_comes(cluster: Cluster) -> None:
    for each in (A, B, C):
        cluster.report_node(each, 0)
    assert cluster.topology().one_way == frozenset()
    cluster.report_links("a", None, [A_TO_B, link("a", "c", "10.0.0.3")])
    assert cluster.topology().one_way == {("a", "b"), ("a", "c")}
    change = cluster.report_links("b", None, [B_TO_A])
    # Only b is told anew; that its counterpart is no longer one-way follows from the links.
    assert change is not None
    assert (change.relinked, change.one_way) == (("b",), frozenset())
    assert cluster.topology().one_way == {("a", "c")}
    cluster.report_links("a", None, [link("a", "c", "10.0.0.3")])
    assert cluster.topology().one_way == {("a", "c"), ("b", "a")}
    cluster.remove_node("a")
    assert cluster.topology().one_way == frozenset()


def test_two_links_the_one_way_make_no_pair(cluster: Cluster) -> None:
    cluster.report_node(A, 0)
    cluster.report_node(node("b", endpoints=(HostPort("10.0.0.2", 1), HostPort("10.1.0.2", 1))), 0)
    cluster.report_links("a", None, [A_TO_B, link("a", "b", "10.1.0.2")])
    cluster.report_links("b", None, [B_TO_A])
    assert cluster.topology().one_way == frozenset()
    cluster.report_links("a", None, [link("a", "b", "10.1.0.2")])
    assert cluster.topology().one_way == frozenset()
    cluster.report_links("a", None, [])
    assert cluster.topology().one_way == {("b", "a")}


def test_misdirections_are_listed_while_both_nodes_live(pair: Cluster) -> None:
    found = Misdirection("a", "b", "x", "172.17.0.1", 52420)
    change = pair.report_links("a", None, [A_TO_B], [found])
    assert change == Change((), (), ("a",), (A_TO_B,), gathering=True, misdirections=(found,))
    assert pair.report_links("a", None, [A_TO_B], [found]) is None
    assert pair.topology().misdirections == (found,)
    pair.remove_node("b")
    assert pair.topology().misdirections == ()
    # Told with the removal: no word of it once more.
    assert pair.report_links("a", None, []) is None
    pair.report_node(B, 0)
    pair.report_links("a", None, [], [found])
    pair.remove_node("a")
    assert pair.topology().misdirections == ()


def test_a_throughput_is_announced_when_it_comes_goes_or_moves_by_a_fifth(pair: Cluster) -> None:
    def reported(bytes_per_second: int | None) -> Change | None:
        measured = None if bytes_per_second is None else Throughput(bytes_per_second, 5.0)
        return pair.report_links("a", None, [replace(A_TO_B, throughput=measured)])

    assert reported(1_000) is not None
    assert reported(1_200) is None
    assert links(pair)[0].throughput == Throughput(1_200, 5.0)
    assert reported(1_201) is not None
    assert reported(None) is not None
    assert reported(None) is None


def test_a_link_at_a_port_that_the_sink_left_is_not_served(pair: Cluster) -> None:
    at_port = replace(A_TO_B, sink_port=52420)
    pair.report_links("a", None, [at_port])
    assert links(pair) == [at_port, B_TO_A]
    pair.report_node(node("b", "10.0.0.2", port=7), 1)
    assert links(pair) == [B_TO_A]
    # A report that crossed with the move is no fault, and changes nothing.
    assert pair.report_links("a", None, [at_port]) is None
    pair.report_links("a", None, [replace(at_port, sink_port=7)])
    assert [k.sink_port for k in links(pair)] == [7, 0]


def test_links_are_wanted_from_each_run_once(pair: Cluster) -> None:
    assert not pair.wants_links("a")
    pair.report_node(node("a", "10.0.0.1", start_ns=2_000), 1)
    assert pair.wants_links("a")
    pair.report_links("a", None, [])
    assert not pair.wants_links("a")
    pair.remove_node("a")
    assert pair.wants_links("a")


def test_a_node_is_probing_until_it_has_asked_everybody(pair: Cluster) -> None:
    assert pair.topology().probing == ()
    pair.report_node(node("a", "10.0.0.1", start_ns=2_000), 1)
    assert pair.topology().probing == ("a",)
    # What it has found so far is no end of it, and no news.
    before = pair.revision
    assert pair.report_links("a", 2_000, [], probing=True) is None
    assert pair.topology().probing == ("a",)
    change = pair.report_links("a", 2_000, [A_TO_B])
    assert change is not None
    assert (change.probing, change.relinked) == ((), ("a",))
    assert pair.revision == before + 1
    # Somebody new came, whom it has to ask.
    pair.report_node(C, 2)
    assert pair.topology().probing == ("c",)
    told = pair.report_links("a", 2_000, [A_TO_B], probing=True)
    assert told == Change(gathering=True, probing=("a", "c"))
    pair.remove_node("c")
    assert pair.topology().probing == ("a",)


def test_links_of_many_nodes_that_come_at_once_are_settled_together(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.topology.domain.cluster.MAX_LINKS_AT_ONCE", 2)
    cluster.report_node(A, 0)
    to_c = link("a", "c", "10.0.0.3")
    cluster.report_links("a", None, [A_TO_B, to_c, link("a", "d", "10.0.0.4")])
    assert cluster.report_node(B, 0) == Change(updated=(B,), gathering=True, probing=("b",))
    assert cluster.report_node(C, 0) == Change(updated=(C,), gathering=True, probing=("b", "c"))
    assert links(cluster) == []
    assert cluster.unsettled
    before = cluster.revision
    change = cluster.settle()
    assert change is not None
    assert (change.relinked, change.links) == (("a",), (A_TO_B, to_c))
    assert links(cluster) == [A_TO_B, to_c]
    assert not cluster.unsettled
    assert cluster.settle() is None
    assert cluster.revision == before + 1


def test_a_full_mesh_costs_what_differs_and_stays_exact(cluster: Cluster) -> None:
    """Random reports, removals and moves against a plain re-computation of what must be seen."""
    draw = random.Random(7)
    names = "abcdef"
    observed: dict[str, tuple[Link, ...]] = {}
    alive: dict[str, Node] = {}
    for step in range(600):
        name = draw.choice(names)
        what = draw.random()
        if what < 0.25 or name not in alive:
            moved = node(name, f"10.0.0.{ord(name)}", port=draw.choice([1, 2]))
            if moved != alive.get(name, moved):
                port = moved.endpoints[0].port
                observed = {
                    s: tuple(k for k in kept if k.sink != name or k.sink_port == port)
                    for s, kept in observed.items()
                }
            alive[name] = moved
            cluster.report_node(moved, 0)
            observed.setdefault(name, ())
        elif what < 0.35:
            cluster.remove_node(name)
            del alive[name], observed[name]
            observed = {s: tuple(k for k in kept if k.sink != name) for s, kept in observed.items()}
        else:
            sinks = [s for s in names if s != name and draw.random() < 0.6]
            found = tuple(
                replace(link(name, s, f"10.0.0.{ord(s)}"), sink_port=draw.choice([1, 2]))
                for s in sinks
            )
            cluster.report_links(name, None, found)
            observed[name] = found
        expected = [
            k
            for source in sorted(observed)
            for k in observed[source]
            if k.sink in alive and k.sink_port == alive[k.sink].endpoints[0].port
        ]
        pairs = {(k.source, k.sink) for k in expected}
        assert links(cluster) == expected, step
        assert cluster.topology().one_way == {(a, b) for a, b in pairs if (b, a) not in pairs}
