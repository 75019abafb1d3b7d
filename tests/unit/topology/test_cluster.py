"""Leases, revisions and duplicates: what reports do to the topology."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from services.common.errors import Reason, ShardringError
from services.topology.domain.cluster import Cluster
from services.topology.domain.model import Change, Link, Node
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
    assert cluster.report_links("a", A.start_ns, [A_TO_B, link("a", "c", "10.0.0.3")]) is None
    assert links(cluster) == []
    change = cluster.report_node(B, 1)
    assert change == Change(updated=(B,), relinked=("a",), links=(A_TO_B,), gathering=True)
    # c comes, but advertises another address than the one reported.
    cluster.report_node(node("c", "10.9.9.9"), 1)
    assert links(cluster) == [A_TO_B]


def test_a_restarted_node_takes_its_place_at_once(pair: Cluster) -> None:
    again = node("a", "10.0.0.1", start_ns=2_000)
    change = pair.report_node(again, 1)
    # What the run before had verified goes; what others verified at the same address stays.
    assert change == Change(updated=(again,), relinked=("a",), gathering=True)
    assert links(pair) == [B_TO_A]
    assert len(pair.topology().nodes) == 2


def test_links_go_with_the_address_or_port_they_end_at(pair: Cluster) -> None:
    pair.report_node(node("a", "10.0.0.1", port=6000, start_ns=2_000), 1)
    assert links(pair) == []
    pair.report_links("b", None, [B_TO_A])
    moved = node("a", "10.0.0.77", port=6000, start_ns=2_000)
    change = pair.report_node(moved, 2)
    assert change == Change(updated=(moved,), relinked=("b",), gathering=True)


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
        assert tuple(nodes[node_id] for node_id in sorted(nodes)) == current.nodes
        assert tuple(k for source in sorted(seen) for k in seen[source]) == current.links
