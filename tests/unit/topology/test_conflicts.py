"""Two machines with one node id, and RDMA on links, as the topology service sees them."""

from dataclasses import replace

import pytest

from services.common.errors import Reason, ShardringError
from services.topology.domain.cluster import Cluster
from services.topology.domain.conflicts import MAX_CLAIMANTS, MIN_KEPT_SECONDS
from services.topology.domain.model import (
    IdentityConflict,
    Interface,
    InterfaceKind,
    Node,
    Rdma,
    RdmaDevice,
    ThunderboltPort,
)
from services.topology.domain.rdma import rdma_device
from tests.unit.topology.examples import link, node

FIRST = node("a", "10.0.0.1", fingerprint="f1")
CLONE = node("a", "10.0.0.4", name="clone", fingerprint="f2", start_ns=9_000)
CONFLICT = IdentityConflict("a", "studio-a (10.0.0.1:52420)", "clone (10.0.0.4:52420)")


@pytest.fixture
def cluster() -> Cluster:
    cluster = Cluster(first_revision=100, lease_seconds=9, now=0)
    cluster.report_node(FIRST, 0)
    return cluster


def refuse(cluster: Cluster, claimant: Node, now: float) -> ShardringError:
    with pytest.raises(ShardringError) as caught:
        cluster.report_node(claimant, now)
    assert caught.value.reason is Reason.NODE_ID_DUPLICATE
    return caught.value


def test_a_clone_takes_no_place_however_late_it_started(cluster: Cluster) -> None:
    refusal = refuse(cluster, CLONE, 1)
    assert refusal.metadata["held_by"] == CONFLICT.held_by
    assert refusal.metadata["claimed_by"] == CONFLICT.claimed_by
    assert cluster.topology().nodes == (FIRST,)
    # And it renews nothing: the first one is there for as long as it reports itself.
    cluster.expire(9)
    assert cluster.topology().nodes == ()


def test_a_claim_is_listed_once_and_for_as_long_as_it_goes_on(cluster: Cluster) -> None:
    refuse(cluster, CLONE, 1)
    change = cluster.note_claim(CLONE, 1)
    assert change is not None
    assert change.conflicts == cluster.topology().conflicts == (CONFLICT,)
    assert cluster.revision == 102
    cluster.report_node(FIRST, 5)
    assert cluster.note_claim(CLONE, 5) is None
    assert cluster.next_expiry() == 9  # the gathering's; leases and claims end later
    cluster.expire(9)
    assert cluster.topology().conflicts == (CONFLICT,)
    cluster.report_node(FIRST, 13)
    assert cluster.expire(5 + MIN_KEPT_SECONDS - 0.1) is None
    ended = cluster.expire(5 + MIN_KEPT_SECONDS)
    assert ended is not None
    assert ended.conflicts == ()
    assert cluster.topology().nodes == (FIRST,)


def test_once_the_first_is_gone_the_place_is_free(cluster: Cluster) -> None:
    cluster.note_claim(CLONE, 1)
    removed = cluster.remove_node("a")
    assert (removed.removed, removed.conflicts) == (("a",), ())
    cluster.report_node(CLONE, 2)
    assert cluster.topology().nodes == (CLONE,)
    refuse(cluster, FIRST, 3)


def test_the_same_machine_takes_its_old_place_at_once_wherever_it_is(cluster: Cluster) -> None:
    moved = node("a", "10.9.9.9", port=7, fingerprint="f1", start_ns=2_000)
    cluster.report_node(moved, 1)
    assert cluster.topology().nodes == (moved,)
    # The run before is no second machine, but must not come back.
    refuse(cluster, FIRST, 2)


def test_where_fingerprints_are_unknown_the_later_start_decides(cluster: Cluster) -> None:
    for known, other in (("f1", ""), ("", "f2")):
        cluster.remove_node("a")
        cluster.report_node(replace(FIRST, fingerprint=known), 0)
        cluster.report_node(replace(CLONE, fingerprint=other), 1)
        assert [n.name for n in cluster.topology().nodes] == ["clone"]


def test_many_claimants_are_listed_up_to_a_bound(cluster: Cluster) -> None:
    for number in range(MAX_CLAIMANTS + 5):
        cluster.note_claim(replace(CLONE, name=f"clone-{number:02}"), 1)
    assert len(cluster.topology().conflicts) == MAX_CLAIMANTS


def mac(node_id: str, address: str, *, enabled: bool = True, peer: str = "") -> Node:
    return node(
        node_id,
        address,
        interfaces=(Interface("en2", InterfaceKind.THUNDERBOLT, (address,)),),
        rdma=Rdma(enabled, (RdmaDevice("rdma_en2", "en2"), RdmaDevice("rdma_en3", "en3"))),
        thunderbolt_ports=(
            ThunderboltPort("en2", f"domain-{node_id}2"),
            ThunderboltPort("en3", f"domain-{node_id}3", (peer,) if peer else ()),
        ),
    )


def test_a_link_carries_rdma_where_both_ends_have_it() -> None:
    # a's cable to b is in en3, b's in en2.
    a, b = mac("a", "10.0.0.1", peer="domain-b2"), mac("b", "10.0.0.2")
    assert rdma_device(a, b, "10.0.0.2") == "rdma_en3"
    # Off at either end, or no cable known there: none.
    for source, sink in (
        (mac("a", "10.0.0.1", enabled=False, peer="domain-b2"), b),
        (a, mac("b", "10.0.0.2", enabled=False)),
        (mac("a", "10.0.0.1"), b),
    ):
        assert rdma_device(source, sink, "10.0.0.2") == ""
    # An address at an interface without a device.
    assert rdma_device(a, b, "10.0.0.99") == ""
    assert rdma_device(a, replace(b, rdma=Rdma(True)), "10.0.0.2") == ""


def test_without_cables_the_interface_the_link_leaves_by_decides() -> None:
    a, b = (
        node(
            node_id,
            address,
            interfaces=(Interface("ens5", InterfaceKind.ETHERNET, (address,)),),
            rdma=Rdma(True, (RdmaDevice("mlx5_0", "ens5"), RdmaDevice("mlx5_1", ""))),
        )
        for node_id, address in (("a", "10.0.0.1"), ("b", "10.0.0.2"))
    )
    assert rdma_device(a, b, "10.0.0.2", "ens5") == "mlx5_0"
    assert rdma_device(a, b, "10.0.0.2", "ens6") == ""
    assert rdma_device(a, b, "10.0.0.2") == ""


def test_links_follow_when_rdma_is_switched_on_and_off(cluster: Cluster) -> None:
    cluster.remove_node("a")
    a, b = mac("a", "10.0.0.1", peer="domain-b2"), mac("b", "10.0.0.2", enabled=False)
    cluster.report_node(a, 0)
    cluster.report_node(b, 0)
    claimed = replace(link("a", "b", "10.0.0.2"), rdma_device="whatever it says")
    cluster.report_links("a", None, [claimed])
    assert [found.rdma_device for found in cluster.topology().links] == [""]
    change = cluster.report_node(mac("b", "10.0.0.2"), 1)
    assert change is not None
    assert [found.rdma_device for found in change.links] == ["rdma_en3"]
    change = cluster.report_node(b, 2)
    assert change is not None
    assert [found.rdma_device for found in change.links] == [""]
