"""RDMA, Thunderbolt ports and identity conflicts as messages, and back."""

from services.topology.domain.model import IdentityConflict, Rdma, RdmaDevice, ThunderboltPort
from shardring.topology.v1 import topology_pb2 as pb


def rdma_to_proto(rdma: Rdma) -> pb.Rdma:
    """Return what a node can do with RDMA as a message."""
    return pb.Rdma(
        enabled=rdma.enabled,
        devices=[pb.RdmaDevice(name=d.name, interface_name=d.interface) for d in rdma.devices],
    )


def rdma_from_proto(message: pb.Rdma) -> Rdma:
    """Return what a message says of RDMA, unchecked."""
    return Rdma(
        message.enabled, tuple(RdmaDevice(d.name, d.interface_name) for d in message.devices)
    )


def port_to_proto(port: ThunderboltPort) -> pb.ThunderboltPort:
    """Return a Thunderbolt port as a message."""
    return pb.ThunderboltPort(
        interface_name=port.interface,
        domain_id=port.domain,
        peer_domain_ids=port.peer_domains,
        link_bits_per_second=port.link_bits_per_second,
        generation=port.generation,
        bridge=port.bridge,
    )


def port_from_proto(message: pb.ThunderboltPort) -> ThunderboltPort:
    """Return a message's Thunderbolt port, unchecked."""
    return ThunderboltPort(
        interface=message.interface_name,
        domain=message.domain_id,
        peer_domains=tuple(message.peer_domain_ids),
        link_bits_per_second=message.link_bits_per_second,
        generation=message.generation,
        bridge=message.bridge,
    )


def conflict_to_proto(conflict: IdentityConflict) -> pb.IdentityConflict:
    """Return an identity conflict as a message."""
    return pb.IdentityConflict(
        node_id=conflict.node_id, held_by=conflict.held_by, claimed_by=conflict.claimed_by
    )


def conflict_from_proto(message: pb.IdentityConflict) -> IdentityConflict:
    """Return a message's identity conflict."""
    return IdentityConflict(message.node_id, message.held_by, message.claimed_by)
