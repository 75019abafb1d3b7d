"""Which nodes may stand in a ring, which pairs of them are linked both ways, what each counts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import networkx as nx

from services.placement.domain.cluster import Cluster, RingBackend
from services.placement.domain.net import Net, blocks, members, net_of
from services.placement.domain.request import PlacementRequest
from services.placement.domain.shards import Room

# Download progress is compared in billionths, so that sums are exact in any order.
WHOLE = 10**9


class DownloadState(StrEnum):
    """Where a node's newest download of the model is; what matters to the score."""

    NONE = "NONE"
    UNFINISHED = "UNFINISHED"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"


@dataclass(frozen=True)
class Download:
    """How much of the model is on one node."""

    state: DownloadState
    downloaded_bytes: int
    total_bytes: int

    @property
    def score(self) -> int:
        """What it counts, 0 to `WHOLE`: all when completed, the part on disk when unfinished."""
        if self.state is DownloadState.COMPLETED:
            return WHOLE
        if self.state is not DownloadState.UNFINISHED or self.total_bytes <= 0:
            return 0
        return WHOLE * max(0, min(self.downloaded_bytes, self.total_bytes)) // self.total_bytes


@dataclass(frozen=True)
class Candidates:
    """The usable part of a cluster. Build it with `candidates_of`."""

    cluster: Cluster
    required: frozenset[str]
    # Nodes that are not excluded and have a backend that the ring's can use; ascending.
    node_ids: tuple[str, ...]
    # Those left out for want of a backend; ascending.
    without_backend: tuple[str, ...]
    # Usable nodes; an edge joins two that are linked both ways, over RDMA where that is asked for.
    # "hop": nanoseconds for a message there and back over the links that would be used, the slower
    # direction.
    graph: nx.Graph
    # The same for the search; `only` leaves it as it is.
    net: Net
    # Usable pairs (source, sink) linked only in this direction; ascending.
    one_way: tuple[tuple[str, str], ...]
    memory_bytes: Mapping[str, int]
    # By node, 0 to `WHOLE`.
    download_scores: Mapping[str, int]
    # By node: memory, and the layers it may and must hold.
    rooms: Mapping[str, Room]
    ring_backend: RingBackend = RingBackend.MLX_RING

    def only(self, node_ids: Sequence[str]) -> "Candidates":
        """Return these with no other nodes usable."""
        return replace(self, node_ids=tuple(node_ids), graph=self.graph.subgraph(node_ids))

    def blocks(self, nodes: int) -> list[int]:
        """Return the sets of three and more nodes, of one of `net`, within which every ring lies:
        biconnected components, or, where all have to reach all, maximal cliques."""
        if self.ring_backend is not RingBackend.JACCL:
            return blocks(self.net.near, nodes)
        cliques = nx.find_cliques(self.graph.subgraph(self.net.named(list(members(nodes)))))
        return sorted(self.net.mask(clique) for clique in cliques if len(clique) > 2)


def candidates_of(
    cluster: Cluster, downloads: Mapping[str, Download], request: PlacementRequest
) -> Candidates:
    """Apply the rules that concern single nodes and single pairs."""
    needs_rdma = request.ring_backend is RingBackend.JACCL
    allowed = [node for node in cluster.nodes.values() if node.node_id not in request.excluded]
    usable = [n.node_id for n in allowed if n.backends_for(request.ring_backend)]
    graph = nx.Graph()
    graph.add_nodes_from(usable)
    one_way = []
    between = cluster.rdma_links if needs_rdma else cluster.best_links
    for (source, sink), link in sorted(between.items()):
        if source not in graph or sink not in graph:
            continue
        back = between.get((sink, source))
        if back is None:
            one_way.append((source, sink))
        elif source < sink:
            hops = (cluster.hop_nanoseconds(way) for way in (link, back))
            graph.add_edge(source, sink, hop=max(hops))
    memory = {
        n: max(0, cluster.nodes[n].memory_available_bytes - request.headroom_bytes) for n in usable
    }
    return Candidates(
        cluster=cluster,
        required=request.required,
        node_ids=tuple(usable),
        without_backend=tuple(node.node_id for node in allowed if node.node_id not in graph),
        graph=graph,
        net=net_of(graph),
        one_way=tuple(one_way),
        memory_bytes=memory,
        download_scores={n: downloads[n].score if n in downloads else 0 for n in usable},
        rooms={n: Room(memory[n], *request.layer_bounds(n)) for n in usable},
        ring_backend=request.ring_backend,
    )
