"""What JACCL, MLX's backend over RDMA, has to be told: devices by pair, and a coordinator."""

from collections.abc import Sequence

from services.common.addresses import HostPort
from services.placement.domain.cluster import Cluster, LinkKind
from services.placement.domain.hosts import ring_ports

# The coordinator carries little and should not share a cable with RDMA.
_COORDINATOR_KINDS = (
    LinkKind.ETHERNET,
    LinkKind.WIFI,
    LinkKind.UNKNOWN,
    LinkKind.MAYBE_ETHERNET,
    LinkKind.THUNDERBOLT,
    LinkKind.VIRTUAL,
    LinkKind.OVERLAY,
)


def device_matrix(cluster: Cluster, order: Sequence[str]) -> list[list[str]]:
    """Return for ranks i and j the RDMA device on i that reaches j; "" for i = j.

    Every ordered pair must be joined by RDMA.
    """
    return [
        [
            "" if i == j else cluster.rdma_links[source, sink].rdma_device
            for j, sink in enumerate(order)
        ]
        for i, source in enumerate(order)
    ]


def coordinator_addresses(cluster: Cluster, order: Sequence[str], request_id: str) -> list[str]:
    """Return where rank 0 listens, and then where each other rank dials it."""
    head = order[0]
    port = ring_ports(request_id, [cluster.addresses[head]])[0]

    def dialled(source: str) -> str:
        links = [link for link in cluster.links_to[head] if link.source == source]
        best = min(links, key=lambda link: (_COORDINATOR_KINDS.index(link.kind), link.address))
        return str(HostPort(best.address, port))

    return [str(HostPort("0.0.0.0", port)), *(dialled(source) for source in order[1:])]
