"""The cluster as placement sees it: nodes, verified links, and which of several links is best."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from functools import cached_property
from typing import TypeVar

from services.common.addresses import HostPort

# A link that nobody measured counts as this slow, so that any measured link goes before it.
UNMEASURED_NANOSECONDS = 10**9
# A token's hidden state where the model does not say: 8192 numbers of two bytes.
MESSAGE_BYTES = 16_384
# Measured links this close to the fastest count as equally fast; then their kind decides.
EQUAL_PERCENT = 20

Choice = TypeVar("Choice")


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


class RingBackend(StrEnum):
    """What carries messages between ranks: MLX's ring over TCP, or JACCL over RDMA."""

    MLX_RING = "MLX_RING"
    JACCL = "JACCL"


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
    # What its runner measured that it reaches. 0: not calibrated.
    weight_bytes_per_second: int = 0
    multiply_adds_per_second: int = 0

    def backends_for(self, ring_backend: RingBackend) -> tuple[Backend, ...]:
        """Return those on which a rank of such a ring can compute, best first."""
        if ring_backend is RingBackend.JACCL:
            return tuple(backend for backend in self.backends if backend is Backend.METAL)
        return self.backends


@dataclass(frozen=True)
class Link:
    """A verified directed link: `source` reaches `sink` at `address`."""

    source: str
    sink: str
    address: str
    kind: LinkKind
    # There and back; None where nobody measured.
    round_trip_nanoseconds: int | None = None
    # None where nobody measured, or not lately.
    throughput_bytes_per_second: int | None = None
    # The interfaces at its two ends; "" where not known.
    source_interface: str = ""
    sink_interface: str = ""
    # The RDMA device of the source at this link; "" where RDMA is off at either end.
    rdma_device: str = ""

    @property
    def is_measured(self) -> bool:
        """True when it is known how long a message takes."""
        return None not in (self.round_trip_nanoseconds, self.throughput_bytes_per_second)

    def hop_nanoseconds(self, message_bytes: int) -> int:
        """How slow a hop over this link counts: one message there and one back."""
        if self.round_trip_nanoseconds is None:
            return UNMEASURED_NANOSECONDS
        if self.throughput_bytes_per_second is None:
            return self.round_trip_nanoseconds
        transfer = 2 * message_bytes * 10**9 // self.throughput_bytes_per_second
        return self.round_trip_nanoseconds + transfer

    def preference(self, message_bytes: int) -> tuple[int, int, str]:
        """Orders the links from one node to another, best first: kind, hop, address."""
        return (self.kind, self.hop_nanoseconds(message_bytes), self.address)

    def is_way_back_of(self, other: "Link") -> bool:
        """Say whether this is `other`'s physical link in the other direction."""
        ends = (self.source_interface, self.sink_interface)
        return "" not in ends and ends == (other.sink_interface, other.source_interface)


@dataclass(frozen=True)
class Cluster:
    """Everything topology knows at one revision. Build it with `cluster_of`."""

    # By node id, ascending.
    nodes: Mapping[str, Node]
    # Between nodes above only, no node to itself.
    links: tuple[Link, ...]
    # True while the topology service waits for nodes to report after a restart.
    gathering: bool = False
    # Nodes that came just now, whose links may not be all verified yet.
    probing: tuple[str, ...] = ()
    # What hops are judged by: a message of this size.
    message_bytes: int = MESSAGE_BYTES

    def hop_nanoseconds(self, link: Link) -> int:
        """How slow a hop over a link counts."""
        return link.hop_nanoseconds(self.message_bytes)

    @cached_property
    def rdma_links(self) -> Mapping[tuple[str, str], Link]:
        """For each ordered pair (source, sink) that RDMA joins, the link to use."""
        between: dict[tuple[str, str], list[Link]] = {}
        for link in self.links:
            if link.rdma_device:
                between.setdefault((link.source, link.sink), []).append(link)
        return {pair: best_link(links, self.message_bytes) for pair, links in between.items()}

    @cached_property
    def best_links(self) -> Mapping[tuple[str, str], Link]:
        """For each ordered pair (source, sink) that is linked, the link to use."""
        between: dict[tuple[str, str], list[Link]] = {}
        for link in self.links:
            between.setdefault((link.source, link.sink), []).append(link)
        best: dict[tuple[str, str], Link] = {}
        for pair, links in between.items():
            back = between.get((pair[1], pair[0]), [])
            if len(links) == 1 and len(back) == 1:
                # No choice, as most often.
                best[pair] = links[0]
            elif pair not in best:
                best[pair], chosen_back = best_pair(links, back, self.message_bytes)
                if chosen_back is not None:
                    best[pair[1], pair[0]] = chosen_back
        return best

    @cached_property
    def links_to(self) -> Mapping[str, Sequence[Link]]:
        """For each node, the links that lead to it."""
        found: dict[str, list[Link]] = {node_id: [] for node_id in self.nodes}
        for link in self.links:
            found[link.sink].append(link)
        return found

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


def cluster_of(
    nodes: Iterable[Node],
    links: Iterable[Link],
    *,
    gathering: bool = False,
    probing: Iterable[str] = (),
) -> Cluster:
    """Return a cluster; links of nodes that are not in it, or to the node itself, are left out."""
    by_id = {node.node_id: node for node in sorted(nodes, key=lambda node: node.node_id)}
    kept = tuple(
        link
        for link in links
        if link.source in by_id and link.sink in by_id and link.source != link.sink
    )
    return Cluster(by_id, kept, gathering, tuple(n for n in sorted(probing) if n in by_id))


def best_pair(
    links: Sequence[Link], back: Sequence[Link], message_bytes: int = MESSAGE_BYTES
) -> tuple[Link, Link | None]:
    """Return which of the links from one node to another to use, and which of those back.

    One physical link for both directions where there is one that carries both; else the best of
    each, and None where none leads back.
    """
    both = [(link, way) for link in links for way in back if way.is_way_back_of(link)]
    if not both:
        there = best_link(links, message_bytes)
        return there, best_link(back, message_bytes) if back else None

    def hop(link: Link) -> int:
        return link.hop_nanoseconds(message_bytes)

    slower = {pair: max(pair, key=hop) for pair in both}
    measured = [pair for pair in both if all(link.is_measured for link in pair)]
    equal = _nearly_fastest([(hop(slower[pair]), pair) for pair in measured])
    rest = [pair for pair in both if pair not in measured]
    return min(
        equal + rest,
        key=lambda pair: (
            slower[pair].preference(message_bytes),
            pair[0].preference(message_bytes),
        ),
    )


def best_link(links: Sequence[Link], message_bytes: int = MESSAGE_BYTES) -> Link:
    """Return the best of the links from one node to another.

    Of the measured ones, those about as fast as the fastest; of these and the ones that were not
    measured, the best by kind, then by time, then by address.
    """
    timed = [(link.hop_nanoseconds(message_bytes), link) for link in links if link.is_measured]
    rest = [link for link in links if not link.is_measured]
    return min(_nearly_fastest(timed) + rest, key=lambda link: link.preference(message_bytes))


def _nearly_fastest(timed: Sequence[tuple[int, Choice]]) -> list[Choice]:
    limit = min((time for time, _ in timed), default=0) * (100 + EQUAL_PERCENT)
    return [choice for time, choice in timed if time * 100 <= limit]
