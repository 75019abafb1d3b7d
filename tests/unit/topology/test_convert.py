"""Messages and back; what newer programs send does no harm."""

from dataclasses import replace

from services.common.addresses import HostPort
from services.topology.domain.model import (
    Backend,
    Change,
    InterfaceKind,
    Link,
    Misdirection,
    Speed,
    Throughput,
    Topology,
)
from services.topology.rpc.convert import event_from_proto, node_from_proto, node_to_proto
from services.topology.rpc.convert_links import (
    kind_from_proto,
    link_from_proto,
    link_to_proto,
    misdirection_from_proto,
    misdirection_to_proto,
)
from services.topology.rpc.frames import Frames
from shardring.common.v1 import common_pb2
from shardring.topology.v1 import topology_pb2
from shardring.topology.v1 import topology_service_pb2 as service_pb
from tests.unit.topology.examples import link, node

NOW = 1_000.0


def test_nodes_and_links_survive_the_wire() -> None:
    sent = node(start_ns=1_700_000_000_123_456_789, last_report_ns=5_000_000_001)
    assert node_from_proto(node_to_proto(sent)) == sent
    calibrated = replace(sent, speed=Speed(100_000_000_000, 3_000_000_000_000))
    assert node_from_proto(node_to_proto(calibrated)) == calibrated
    full = Link(
        "a",
        "b",
        "fd00::1",
        InterfaceKind.WIFI,
        1_500_000_001,
        2_500_000_001,
        Throughput(1_000, NOW - 60),
        52420,
        "en0",
        "rdma_en0",
    )
    for link_sent in (full, link("a", "b", "10.0.0.2")):
        assert link_from_proto(link_to_proto(link_sent, NOW), NOW) == link_sent
    found = Misdirection("a", "b", "c", "10.0.0.2", 7)
    assert misdirection_from_proto(misdirection_to_proto(found)) == found


def test_a_throughput_travels_with_its_age_and_not_with_a_time_of_day() -> None:
    measured = replace(link("a", "b", "10.0.0.2"), throughput=Throughput(1_000, 100.0))
    message = link_to_proto(measured, now=160.5)
    assert message.throughput_age.seconds == 61
    # Here the clock of another process counts, which says 5 where the sender's says 160.5.
    assert link_from_proto(message, now=5.0).throughput == Throughput(1_000, 5.0 - 61)


def test_a_throughput_that_is_too_old_is_not_told() -> None:
    measured = replace(link("a", "b", "10.0.0.2"), throughput=Throughput(1_000, 0.0))
    assert link_to_proto(measured, 900).HasField("throughput_bytes_per_second")
    for message in (
        link_to_proto(measured, 900.1),
        # The message may be sent later: what it says must hold by then.
        link_to_proto(measured, 881, ahead_seconds=20),
    ):
        assert not message.HasField("throughput_bytes_per_second")
        assert not message.HasField("throughput_age")
    message = link_to_proto(measured, 800)
    message.throughput_age.seconds = 901
    assert link_from_proto(message, 0).throughput is None


def test_events_survive_the_wire() -> None:
    frames = Frames()
    topology = Topology(
        (node("a"), node("b", "10.0.0.2")),
        (
            (link("a", "b", "10.0.0.2"),),
            (link("b", "a", "10.0.0.1"), link("b", "c", "10.0.0.3")),
        ),
        gathering=True,
        misdirections=(Misdirection("a", "b", "", "10.0.0.2", 7),),
        one_way=frozenset({("b", "c")}),
    )
    assert _event(frames.snapshot(7, topology, NOW)) == (7, topology)
    answer = service_pb.GetTopologyResponse.FromString(frames.answer(8, topology, NOW))
    assert answer.revision == 8
    assert [k.one_way for k in answer.topology.links] == [False, False, True]
    for number, change in enumerate(
        (
            Change((node("a"),), ("b",), ("a",), (link("a", "c", "10.0.0.3"),), gathering=True),
            Change(
                links=(link("a", "c", "10.0.0.3"),),
                misdirections=(Misdirection("a", "b", "", "10.0.0.2", 7),),
                one_way=frozenset({("a", "c")}),
            ),
            Change(),
        )
    ):
        data = frames.change(number, change, NOW)
        assert _event(data) == (number, change)


def test_what_differs_is_encoded_anew() -> None:
    frames = Frames()
    a, b = link("a", "b", "10.0.0.2"), link("b", "a", "10.0.0.1")
    one = Topology((node("a"),), ((a,),), gathering=False, one_way=frozenset({("a", "b")}))
    two = Topology((node("a"),), ((a,), (b,)), gathering=False)
    three = Topology(
        (node("a", name="other"),), ((replace(a, round_trip_ns=9),), (b,)), gathering=True
    )
    for topology in (one, two, three, two, one):
        assert _event(frames.snapshot(1, topology, NOW))[1] == topology


def test_a_served_age_is_never_below_the_real_one() -> None:
    frames = Frames()
    measured = replace(link("a", "b", "10.0.0.2"), throughput=Throughput(1_000, 0.0))
    topology = Topology((), ((measured,),), gathering=False)
    for now in (1.0, 10.0, 40.9, 41.1, 90.0, 850.0, 861.0, 899.0, 901.0):
        answer = service_pb.GetTopologyResponse.FromString(frames.answer(1, topology, now))
        (served,) = answer.topology.links
        if served.HasField("throughput_bytes_per_second"):
            assert now <= served.throughput_age.seconds <= min(now + 41, 900)
        else:
            assert now > 858


def _event(data: bytes) -> tuple[int, Topology | Change]:
    message = service_pb.WatchTopologyResponse.FromString(data)
    return message.revision, event_from_proto(message, NOW)


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
    assert event_from_proto(service_pb.WatchTopologyResponse(), NOW) == Change()
