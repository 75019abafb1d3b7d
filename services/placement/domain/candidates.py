"""Which nodes may stand in a ring, which pairs of them are linked both ways, what each counts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import networkx as nx

from services.placement.domain.cluster import Cluster
from services.placement.domain.request import PlacementRequest

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
    # Nodes that are not excluded and have a backend; ascending.
    node_ids: tuple[str, ...]
    # Those left out for want of a backend; ascending.
    without_backend: tuple[str, ...]
    # Usable nodes; an edge joins two that are linked both ways. "hop": nanoseconds for a
    # message there and back over the links that would be used, the slower direction.
    graph: nx.Graph
    # Usable pairs (source, sink) linked only in this direction; ascending.
    one_way: tuple[tuple[str, str], ...]
    memory_bytes: Mapping[str, int]
    # By node, 0 to `WHOLE`.
    download_scores: Mapping[str, int]

    def only(self, node_ids: Sequence[str]) -> "Candidates":
        """Return these with no other nodes usable."""
        return replace(self, node_ids=tuple(node_ids), graph=self.graph.subgraph(node_ids))


def candidates_of(
    cluster: Cluster, downloads: Mapping[str, Download], request: PlacementRequest
) -> Candidates:
    """Apply the rules that concern single nodes and single pairs."""
    allowed = [node for node in cluster.nodes.values() if node.node_id not in request.excluded]
    usable = [node.node_id for node in allowed if node.backends]
    graph = nx.Graph()
    graph.add_nodes_from(usable)
    one_way = []
    for (source, sink), link in sorted(cluster.best_links.items()):
        if source not in graph or sink not in graph:
            continue
        back = cluster.best_links.get((sink, source))
        if back is None:
            one_way.append((source, sink))
        elif source < sink:
            hop = max(link.hop_nanoseconds, back.hop_nanoseconds)
            graph.add_edge(source, sink, hop=hop)
    return Candidates(
        cluster=cluster,
        required=request.required,
        node_ids=tuple(usable),
        without_backend=tuple(node.node_id for node in allowed if not node.backends),
        graph=graph,
        one_way=tuple(one_way),
        memory_bytes={n: max(0, cluster.nodes[n].memory_available_bytes) for n in usable},
        download_scores={n: downloads[n].score if n in downloads else 0 for n in usable},
    )
