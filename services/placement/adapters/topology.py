"""Reads the cluster from the topology service."""

import asyncio

from services.common import deadline
from services.common.addresses import HostPort
from services.common.channel import Remote
from services.placement.domain.cluster import Backend, Cluster, Link, LinkKind, Node, cluster_of
from shardring.common.v1 import common_pb2
from shardring.topology.v1 import topology_pb2, topology_service_pb2, topology_service_pb2_grpc

TIMEOUT_SECONDS = 5.0

_KINDS = {
    topology_pb2.INTERFACE_KIND_THUNDERBOLT: LinkKind.THUNDERBOLT,
    topology_pb2.INTERFACE_KIND_MAYBE_ETHERNET: LinkKind.MAYBE_ETHERNET,
    topology_pb2.INTERFACE_KIND_ETHERNET: LinkKind.ETHERNET,
    topology_pb2.INTERFACE_KIND_WIFI: LinkKind.WIFI,
    topology_pb2.INTERFACE_KIND_VIRTUAL: LinkKind.VIRTUAL,
    topology_pb2.INTERFACE_KIND_OVERLAY: LinkKind.OVERLAY,
}
_BACKENDS = {
    common_pb2.BACKEND_METAL: Backend.METAL,
    common_pb2.BACKEND_CPU: Backend.CPU,
    common_pb2.BACKEND_CUDA: Backend.CUDA,
}


class TopologyClient:
    """Calls TopologyService over `remote`, which the caller closes."""

    def __init__(self, remote: Remote) -> None:
        self._remote = remote
        self._stub = topology_service_pb2_grpc.TopologyServiceStub(remote.channel)

    async def cluster(self) -> Cluster:
        """Return everything known now. Raises SERVICE_UNAVAILABLE or SERVICE_TIMEOUT."""
        response = await self._remote.unary(
            self._stub.GetTopology,
            topology_service_pb2.GetTopologyRequest(),
            timeout=deadline.leaving_time(TIMEOUT_SECONDS),
        )
        # Hundreds of nodes have tens of thousands of links: other calls go on meanwhile.
        return await asyncio.to_thread(cluster_from_proto, response.topology)


def cluster_from_proto(topology: topology_pb2.Topology) -> Cluster:
    """Return the cluster a Topology message tells of."""
    interfaces = {
        (node.node_id, address): interface.name
        for node in topology.nodes
        for interface in node.interfaces
        for address in interface.addresses
    }
    return cluster_of(
        map(node_from_proto, topology.nodes),
        (
            link_from_proto(link, interfaces.get((link.sink_node_id, link.sink_address), ""))
            for link in topology.links
        ),
        gathering=topology.gathering,
        probing=topology.probing_node_ids,
    )


def node_from_proto(node: topology_pb2.Node) -> Node:
    """Return a node; backends this program does not know are left out."""
    return Node(
        node_id=node.node_id,
        name=node.name or node.node_id,
        memory_available_bytes=max(0, node.memory_available_bytes),
        backends=tuple(_BACKENDS[backend] for backend in node.backends if backend in _BACKENDS),
        endpoints=tuple(HostPort(point.address, point.port) for point in node.endpoints),
        weight_bytes_per_second=max(0, node.weight_bytes_per_second),
        multiply_adds_per_second=max(0, node.multiply_adds_per_second),
    )


def link_from_proto(link: topology_pb2.Link, sink_interface: str = "") -> Link:
    """Return a link; without a round trip or throughput above 0 that counts as not measured.

    `sink_interface` is the one with the link's address, "" where not known.
    """
    nanoseconds = link.round_trip.ToNanoseconds()
    bytes_per_second = link.throughput_bytes_per_second
    return Link(
        source=link.source_node_id,
        sink=link.sink_node_id,
        address=link.sink_address,
        kind=_KINDS.get(link.kind, LinkKind.UNKNOWN),
        round_trip_nanoseconds=nanoseconds if nanoseconds > 0 else None,
        throughput_bytes_per_second=bytes_per_second if bytes_per_second > 0 else None,
        source_interface=link.source_interface,
        sink_interface=sink_interface,
        rdma_device=link.rdma_device,
    )
