"""Nodes, links and topologies as messages, and back."""

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from services.common.addresses import HostPort
from services.topology.domain.addresses import canonical
from services.topology.domain.model import (
    Backend,
    Change,
    Interface,
    InterfaceKind,
    Link,
    Node,
    Topology,
)
from shardring.common.v1 import common_pb2
from shardring.topology.v1 import topology_pb2 as pb
from shardring.topology.v1 import topology_service_pb2 as service_pb

_KINDS: dict[InterfaceKind, pb.InterfaceKind.ValueType] = {
    kind: pb.InterfaceKind.Value(f"INTERFACE_KIND_{kind.name}") for kind in InterfaceKind
}
_KINDS_BACK = {number: kind for kind, number in _KINDS.items()}
_BACKENDS: dict[Backend, common_pb2.Backend.ValueType] = {
    backend: common_pb2.Backend.Value(f"BACKEND_{backend.name}") for backend in Backend
}
_BACKENDS_BACK = {number: backend for backend, number in _BACKENDS.items()}


def kind_from_proto(number: int) -> InterfaceKind:
    """Return a kind; UNKNOWN where it is not stated or a newer program's."""
    return _KINDS_BACK.get(number, InterfaceKind.UNKNOWN)  # type: ignore[call-overload, no-any-return]


def node_to_proto(node: Node) -> pb.Node:
    """Return a node as a message."""
    message = pb.Node(
        node_id=node.node_id,
        name=node.name,
        start_time=_timestamp(node.start_ns),
        endpoints=[common_pb2.Endpoint(address=e.host, port=e.port) for e in node.endpoints],
        interfaces=[
            pb.NetworkInterface(name=i.name, kind=_KINDS[i.kind], addresses=i.addresses)
            for i in node.interfaces
        ],
        memory_total_bytes=node.memory_total_bytes,
        memory_available_bytes=node.memory_available_bytes,
        backends=[_BACKENDS[backend] for backend in node.backends],
    )
    if node.last_report_ns:
        message.last_report_time.CopyFrom(_timestamp(node.last_report_ns))
    return message


def node_from_proto(message: pb.Node) -> Node:
    """Return a message's node, unchecked; backends this program does not know are left out."""
    known = (_BACKENDS_BACK.get(number) for number in message.backends)
    return Node(
        node_id=message.node_id,
        name=message.name,
        start_ns=_nanoseconds(message.start_time),
        endpoints=tuple(HostPort(canonical(e.address), e.port) for e in message.endpoints),
        interfaces=tuple(
            Interface(i.name, kind_from_proto(i.kind), tuple(canonical(a) for a in i.addresses))
            for i in message.interfaces
        ),
        memory_total_bytes=message.memory_total_bytes,
        memory_available_bytes=message.memory_available_bytes,
        backends=tuple(dict.fromkeys(backend for backend in known if backend is not None)),
        last_report_ns=_nanoseconds(message.last_report_time),
    )


def link_to_proto(link: Link) -> pb.Link:
    """Return a link as a message."""
    return pb.Link(
        source_node_id=link.source,
        sink_node_id=link.sink,
        sink_address=link.sink_address,
        kind=_KINDS[link.kind],
        round_trip=_duration(link.round_trip_ns),
    )


def link_from_proto(message: pb.Link) -> Link:
    """Return a message's link, unchecked."""
    return Link(
        source=message.source_node_id,
        sink=message.sink_node_id,
        sink_address=canonical(message.sink_address),
        kind=kind_from_proto(message.kind),
        round_trip_ns=_nanoseconds(message.round_trip),
    )


def links_request_to_proto(
    source: str, start_ns: int, links: tuple[Link, ...]
) -> service_pb.ReportLinksRequest:
    """Return the report of all links that one run of a node observed."""
    return service_pb.ReportLinksRequest(
        source_node_id=source,
        links=[link_to_proto(link) for link in links],
        source_start_time=_timestamp(start_ns),
    )


def start_ns_from_proto(request: service_pb.ReportLinksRequest) -> int | None:
    """Return which run of the source reports links, None where it is not said."""
    if not request.HasField("source_start_time"):
        return None
    return _nanoseconds(request.source_start_time)


def lease_to_proto(
    lease_seconds: float, heartbeat_seconds: float, revision: int
) -> service_pb.ReportNodeResponse:
    """Return the answer to a node's report."""
    return service_pb.ReportNodeResponse(
        lease=_duration(round(lease_seconds * 1e9)),
        heartbeat_interval=_duration(round(heartbeat_seconds * 1e9)),
        revision=revision,
    )


def heartbeat_seconds_from_proto(response: service_pb.ReportNodeResponse) -> float:
    """Return how often a node should report."""
    return _nanoseconds(response.heartbeat_interval) / 1e9


def topology_to_proto(topology: Topology) -> pb.Topology:
    """Return a topology as a message."""
    return pb.Topology(
        nodes=[node_to_proto(node) for node in topology.nodes],
        links=[link_to_proto(link) for link in topology.links],
        gathering=topology.gathering,
    )


def event_to_proto(revision: int, event: Topology | Change) -> service_pb.WatchTopologyResponse:
    """Return one message of a watch."""
    if isinstance(event, Topology):
        return service_pb.WatchTopologyResponse(
            revision=revision, snapshot=topology_to_proto(event)
        )
    return service_pb.WatchTopologyResponse(
        revision=revision,
        change=service_pb.TopologyChange(
            updated_nodes=[node_to_proto(node) for node in event.updated],
            removed_node_ids=event.removed,
            relinked_source_node_ids=event.relinked,
            links=[link_to_proto(link) for link in event.links],
            gathering=event.gathering,
        ),
    )


def event_from_proto(message: service_pb.WatchTopologyResponse) -> Topology | Change:
    """Return what one message of a watch says."""
    if message.HasField("snapshot"):
        return Topology(
            nodes=tuple(node_from_proto(node) for node in message.snapshot.nodes),
            links=tuple(link_from_proto(link) for link in message.snapshot.links),
            gathering=message.snapshot.gathering,
        )
    return Change(
        updated=tuple(node_from_proto(node) for node in message.change.updated_nodes),
        removed=tuple(message.change.removed_node_ids),
        relinked=tuple(message.change.relinked_source_node_ids),
        links=tuple(link_from_proto(link) for link in message.change.links),
        gathering=message.change.gathering,
    )


def _nanoseconds(message: Timestamp | Duration) -> int:
    # Not ToNanoseconds: out of range, it raises; here that is for the rules to refuse.
    return message.seconds * 1_000_000_000 + message.nanos


def _timestamp(nanoseconds: int) -> Timestamp:
    return Timestamp(seconds=nanoseconds // 10**9, nanos=nanoseconds % 10**9)


def _duration(nanoseconds: int) -> Duration:
    return Duration(seconds=nanoseconds // 10**9, nanos=nanoseconds % 10**9)
