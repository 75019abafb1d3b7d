"""The agent's picture of its peers."""

from services.topology.agent.peers import Peers
from services.topology.domain.model import Change, Topology
from tests.unit.topology.examples import link, node

A, B, C = node("a"), node("b"), node("c")


def peers(*events: Topology | Change) -> Peers:
    peers = Peers()
    for event in events:
        peers.apply(event)
    return peers


def known(*events: Topology | Change) -> set[str]:
    return set(peers(*events).nodes)


SETTLED = Topology((A, B), (), gathering=False)


def test_snapshots_and_changes() -> None:
    assert known(SETTLED) == {"a", "b"}
    assert known(SETTLED, Change(updated=(C,), removed=("a",))) == {"b", "c"}
    assert known(SETTLED, Topology((C,), (), gathering=False)) == {"c"}
    newer = node("a", port=7)
    assert peers(SETTLED, Change(updated=(newer,))).nodes["a"] is newer


def test_a_restarted_service_loses_no_peers_while_it_gathers() -> None:
    restarted = Topology((B,), (), gathering=True)
    gathering = (SETTLED, restarted, Change(updated=(C,), gathering=True))
    assert known(*gathering) == {"a", "b", "c"}
    assert known(*gathering, Change(gathering=False)) == {"b", "c"}
    back = Change(updated=(A,), gathering=True)
    assert known(*gathering, back, Change(gathering=False)) == {"a", "b", "c"}
    assert known(*gathering, Change(removed=("a",), gathering=True)) == {"b", "c"}


def test_says_whether_nodes_may_have_changed() -> None:
    settled = peers(SETTLED)
    assert not settled.apply(Change(relinked=("a",), links=(link("a", "b", "10.0.0.2"),)))
    assert settled.apply(Change(updated=(C,)))
    assert settled.apply(Topology((B,), (), gathering=True))
    assert settled.apply(Change(gathering=False))
