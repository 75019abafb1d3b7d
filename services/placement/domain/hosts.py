"""Host lists of an MLX ring, and the ports its ranks listen on."""

import hashlib
from collections.abc import Sequence

from services.common.addresses import HostPort
from services.placement.domain.cluster import Cluster

# Above Linux's usual range for outgoing connections (32768 to 60999), so that a ring's port is
# seldom taken by one. macOS uses up to 65535 for those; a taken port is noticed at the start.
FIRST_PORT = 61000
PORT_COUNT = 4001

# RFC 5737 TEST-NET-2: stands for ranks that are not neighbours and are never dialled.
NOT_A_NEIGHBOUR = HostPort("198.51.100.1", 0)


def ring_ports(request_id: str, addresses: Sequence[frozenset[str]]) -> list[int]:
    """Return the port each rank listens on.

    One port, chosen by `request_id`, for all ranks but those that share an address with an
    earlier rank (`addresses[r]`: those at which rank r's node is reached), which take the next.
    """
    digest = hashlib.sha256(request_id.encode()).digest()
    first = int.from_bytes(digest[:8], "big") % PORT_COUNT
    offsets: list[int] = []
    for rank, own in enumerate(addresses):
        taken = {offsets[earlier] for earlier in range(rank) if own & addresses[earlier]}
        offsets.append(next(offset for offset in range(rank + 1) if offset not in taken))
    return [FIRST_PORT + (first + offset) % PORT_COUNT for offset in offsets]


def host_lists(cluster: Cluster, order: Sequence[str], request_id: str) -> list[list[str]]:
    """Return each rank's host list for a ring in rank order; empty lists for a ring of one.

    Entry i of rank r's list is 0.0.0.0 for i = r, the best address at which r reaches i for its
    neighbours, and a placeholder for everyone else. Neighbours must be linked both ways.
    """
    count = len(order)
    if count == 1:
        return [[]]
    ports = ring_ports(request_id, [cluster.addresses[node_id] for node_id in order])

    def entry(rank: int, other: int) -> str:
        link = cluster.best_links[order[rank], order[other]]
        return str(HostPort(link.address, ports[other]))

    lists = [[str(NOT_A_NEIGHBOUR)] * count for _ in order]
    for rank, hosts in enumerate(lists):
        for other in ((rank - 1) % count, (rank + 1) % count):
            hosts[other] = entry(rank, other)
        hosts[rank] = str(HostPort("0.0.0.0", ports[rank]))
    return lists


def runner_endpoints(cluster: Cluster, node_id: str, ring: Sequence[str]) -> list[HostPort]:
    """Return where the node's runner listens, addresses verified from other ring nodes first."""
    others = set(ring)
    verified = {link.address for link in cluster.links_to[node_id] if link.source in others}
    endpoints = cluster.nodes[node_id].endpoints
    return sorted(endpoints, key=lambda endpoint: endpoint.host not in verified)
