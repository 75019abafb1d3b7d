"""Which RDMA device of a source leads to a sink's address. Gated at both ends."""

from services.topology.domain.model import Node


def rdma_device(source: Node, sink: Node, sink_address: str, source_interface: str = "") -> str:
    """Return the source's RDMA device for a link, "" where it has none.

    Both ends must have RDMA enabled and list a device on the interface at their end. The source's
    end is the Thunderbolt port that is cabled to the sink's; where no cable is known, it is
    `source_interface`, the one the link was verified from.
    """
    if not (source.rdma.enabled and sink.rdma.enabled):
        return ""
    far = sink.interface_at(sink_address)
    if far is None or far.name not in {device.interface for device in sink.rdma.devices}:
        return ""
    near = _cabled_interfaces(source, sink, far.name) or {source_interface}
    # Two cables from one interface's port do not exist; of several devices the first will do.
    return next((d.name for d in source.rdma.devices if d.interface and d.interface in near), "")


def _cabled_interfaces(source: Node, sink: Node, sink_interface: str) -> set[str]:
    domains = {
        p.domain for p in sink.thunderbolt_ports if p.domain and p.interface == sink_interface
    }
    return {p.interface for p in source.thunderbolt_ports if domains & set(p.peer_domains)}
