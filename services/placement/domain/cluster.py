"""The cluster as placement sees it: nodes, verified links, and which of several links is best."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from functools import cached_property

from services.common.addresses import HostPort

# A link that nobody measured counts as this slow, so that any measured link goes before it.
UNMEASURED_NANOSECONDS = 10**9


class LinkKind(IntEnum):
    """What a link runs over; the smaller, the better where speed is not known."""

    THUNDERBOLT = 0
    MAYBE_ETHERNET = 1
    ETHERNET = 2
    WIFI = 3
    UNKNOWN = 4
    VIRTUAL = 5
    OVERLAY = 6


class Backend(StrEnum):
    """What a rank of an MLX ring over TCP computes on."""

    METAL = "METAL"
    CPU = "CPU"
    CUDA = "CUDA"


@dataclass(frozen=True)
class Node:
    """One live node."""

    node_id: str
    name: str
    # Bytes that shards may still take. At least 0.
    memory_available_bytes: int
    # Best first; empty: the node runs no shards.
    backends: tuple[Backend, ...]
    # Where its runner listens, as the node advertises it, best guess first.
    endpoints: tuple[HostPort, ...] = ()


@dataclass(frozen=True)
class Link:
    """A verified directed link: `source` reaches `sink` at `address`."""

    source: str
    sink: str
    address: str
    kind: LinkKind
    # There and back; None where nobody measured.
    round_trip_nanoseconds: int | None = None

    @property
    def hop_nanoseconds(self) -> int:
        """How slow a hop over this link counts."""
        if self.round_trip_nanoseconds is None:
            return UNMEASURED_NANOSECONDS
        return self.round_trip_nanoseconds

    @property
    def preference(self) -> tuple[int, int, str]:
        """Orders the links from one node to another, best first: kind, round trip, address."""
        return (self.kind, self.hop_nanoseconds, self.address)


@dataclass(frozen=True)
class Cluster:
    """Everything topology knows at one revision. Build it with `cluster_of`."""

    # By node id, ascending.
    nodes: Mapping[str, Node]
    # Between nodes above only, no node to itself.
    links: tuple[Link, ...]
    # True while the topology service waits for nodes to report after a restart.
    gathering: bool = False

    @cached_property
    def best_links(self) -> Mapping[tuple[str, str], Link]:
        """For each ordered pair (source, sink) that is linked, the link to use."""
        best: dict[tuple[str, str], Link] = {}
        for link in sorted(self.links, key=lambda link: link.preference):
            best.setdefault((link.source, link.sink), link)
        return best

    @cached_property
    def addresses(self) -> Mapping[str, frozenset[str]]:
        """For each node, every address at which another node has verified it."""
        found: dict[str, set[str]] = {node_id: set() for node_id in self.nodes}
        for link in self.links:
            found[link.sink].add(link.address)
        return {node_id: frozenset(addresses) for node_id, addresses in found.items()}

    @cached_property
    def leaves(self) -> frozenset[str]:
        """Nodes with at most one outgoing neighbour."""
        neighbour_count = dict.fromkeys(self.nodes, 0)
        for source, _ in self.best_links:
            neighbour_count[source] += 1
        return frozenset(node_id for node_id, count in neighbour_count.items() if count <= 1)


def cluster_of(nodes: Iterable[Node], links: Iterable[Link], *, gathering: bool = False) -> Cluster:
    """Return a cluster; links of nodes that are not in it, or to the node itself, are left out."""
    by_id = {node.node_id: node for node in sorted(nodes, key=lambda node: node.node_id)}
    kept = tuple(
        link
        for link in links
        if link.source in by_id and link.sink in by_id and link.source != link.sink
    )
    return Cluster(by_id, kept, gathering)
