"""Messages and back; what newer programs send does no harm."""

from dataclasses import replace

import pytest

from services.common.addresses import HostPort
from services.topology.domain.model import Backend, Change, InterfaceKind, Topology
from services.topology.rpc.convert import (
    event_from_proto,
    event_to_proto,
    kind_from_proto,
    link_from_proto,
    link_to_proto,
    node_from_proto,
    node_to_proto,
)
from shardring.common.v1 import common_pb2
from shardring.topology.v1 import topology_pb2, topology_service_pb2
from tests.unit.topology.examples import link, node


def test_nodes_and_links_survive_the_wire() -> None:
    sent = node(start_ns=1_700_000_000_123_456_789, last_report_ns=5_000_000_001)
    assert node_from_proto(node_to_proto(sent)) == sent
    assert link_from_proto(link_to_proto(link("a", "b", "fd00::1", 1_500_000_001))) == link(
        "a", "b", "fd00::1", 1_500_000_001
    )


@pytest.mark.parametrize(
    "event",
    [
        Topology((node("a"),), (link("a", "b", "10.0.0.2"),), gathering=True),
        Change((node("a"),), ("b",), ("a",), (link("a", "c", "10.0.0.3"),), gathering=True),
        Change(),
    ],
)
def test_events_survive_the_wire(event: Topology | Change) -> None:
    assert event_from_proto(event_to_proto(7, event)) == event


def test_kinds_have_the_names_of_the_proto() -> None:
    names = {name.removeprefix("INTERFACE_KIND_") for name in topology_pb2.InterfaceKind.keys()}
    assert names - {"UNSPECIFIED"} == {kind.name for kind in InterfaceKind}


def test_what_a_newer_client_sends_is_unknown_or_left_out() -> None:
    assert kind_from_proto(0) is kind_from_proto(99) is InterfaceKind.UNKNOWN
    message = node_to_proto(node())
    message.backends.extend([99, common_pb2.BACKEND_CPU])  # type: ignore[list-item]
    assert node_from_proto(message).backends == (Backend.CPU,)


def test_addresses_get_their_usual_spelling() -> None:
    message = node_to_proto(
        replace(node(), endpoints=(HostPort("FD00:0::1", 1), HostPort("::ffff:10.0.0.1", 1)))
    )
    assert [endpoint.host for endpoint in node_from_proto(message).endpoints] == [
        "fd00::1",
        "10.0.0.1",
    ]


def test_times_out_of_range_are_left_to_the_rules() -> None:
    message = topology_pb2.Node()
    message.start_time.seconds = 2**62
    assert node_from_proto(message).start_ns == 2**62 * 10**9
    assert event_from_proto(topology_service_pb2.WatchTopologyResponse()) == Change()
