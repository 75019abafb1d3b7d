"""The cluster as placement sees it: nodes, verified links, and which of several links is best."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from functools import cached_property
from typing import TypeVar

from services.common.addresses import HostPort

# A link that nobody measured counts as this slow, so that any measured link goes before it.
UNMEASURED_NANOSECONDS = 10**9
# A token's hidden state of a large model: 8192 numbers of two bytes.
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
    # None where nobody measured, or not lately.
    throughput_bytes_per_second: int | None = None
    # The interfaces at its two ends; "" where not known.
    source_interface: str = ""
    sink_interface: str = ""

    @property
    def is_measured(self) -> bool:
        """True when it is known how long a message takes."""
        return None not in (self.round_trip_nanoseconds, self.throughput_bytes_per_second)

    @property
    def hop_nanoseconds(self) -> int:
        """How slow a hop over this link counts: one message there and one back."""
        if self.round_trip_nanoseconds is None:
            return UNMEASURED_NANOSECONDS
        if self.throughput_bytes_per_second is None:
            return self.round_trip_nanoseconds
        transfer = 2 * MESSAGE_BYTES * 10**9 // self.throughput_bytes_per_second
        return self.round_trip_nanoseconds + transfer

    @property
    def preference(self) -> tuple[int, int, str]:
        """Orders the links from one node to another, best first: kind, hop, address."""
        return (self.kind, self.hop_nanoseconds, self.address)

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

    @cached_property
    def best_links(self) -> Mapping[tuple[str, str], Link]:
        """For each ordered pair (source, sink) that is linked, the link to use."""
        between: dict[tuple[str, str], list[Link]] = {}
        for link in self.links:
            between.setdefault((link.source, link.sink), []).append(link)
        best: dict[tuple[str, str], Link] = {}
        for pair, links in between.items():
            back = between.get((pair[1], pair[0]), [])
            if pair not in best:
                best[pair], chosen_back = best_pair(links, back)
                if chosen_back is not None:
                    best[pair[1], pair[0]] = chosen_back
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


def best_pair(links: Sequence[Link], back: Sequence[Link]) -> tuple[Link, Link | None]:
    """Return which of the links from one node to another to use, and which of those back.

    One physical link for both directions where there is one that carries both; else the best of
    each, and None where none leads back.
    """
    both = [(link, way) for link in links for way in back if way.is_way_back_of(link)]
    if not both:
        return best_link(links), best_link(back) if back else None
    slower = {pair: max(pair, key=lambda link: link.hop_nanoseconds) for pair in both}
    measured = [pair for pair in both if all(link.is_measured for link in pair)]
    equal = _nearly_fastest([(slower[pair].hop_nanoseconds, pair) for pair in measured])
    rest = [pair for pair in both if pair not in measured]
    return min(equal + rest, key=lambda pair: (slower[pair].preference, pair[0].preference))


def best_link(links: Sequence[Link]) -> Link:
    """Return the best of the links from one node to another.

    Of the measured ones, those about as fast as the fastest; of these and the ones that were not
    measured, the best by kind, then by time, then by address.
    """
    equal = _nearly_fastest([(link.hop_nanoseconds, link) for link in links if link.is_measured])
    rest = [link for link in links if not link.is_measured]
    return min(equal + rest, key=lambda link: link.preference)


def _nearly_fastest(timed: Sequence[tuple[int, Choice]]) -> list[Choice]:
    limit = min((time for time, _ in timed), default=0) * (100 + EQUAL_PERCENT)
    return [choice for time, choice in timed if time * 100 <= limit]
