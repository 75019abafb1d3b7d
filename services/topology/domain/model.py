"""What the topology is made of. All values are immutable."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum, auto

from services.common.addresses import HostPort


class InterfaceKind(StrEnum):
    """What a network interface is; meanings as in shardring.topology.v1.InterfaceKind."""

    THUNDERBOLT = auto()
    MAYBE_ETHERNET = auto()
    ETHERNET = auto()
    WIFI = auto()
    UNKNOWN = auto()
    VIRTUAL = auto()
    OVERLAY = auto()


class Backend(StrEnum):
    """What a node computes on; meanings as in shardring.common.v1.Backend."""

    METAL = auto()
    CPU = auto()
    CUDA = auto()


@dataclass(frozen=True)
class Interface:
    """A network interface and its addresses, without prefix length or brackets."""

    name: str
    kind: InterfaceKind
    addresses: tuple[str, ...]


@dataclass(frozen=True)
class Node:
    """One machine. Times are nanoseconds since 1970; `start_ns` numbers the run of the node.

    `start_ns` is on the node's own clock and only ever compared with other runs of the same node;
    `last_report_ns` is on the service's clock, 0 where not set.
    """

    node_id: str
    name: str
    start_ns: int
    endpoints: tuple[HostPort, ...]
    interfaces: tuple[Interface, ...]
    memory_total_bytes: int
    memory_available_bytes: int
    backends: tuple[Backend, ...]
    last_report_ns: int = 0

    def described(self) -> str:
        """Return the node's name and first endpoint, for messages to people."""
        return f"{self.name} ({self.endpoints[0]})" if self.endpoints else self.name

    def hosts(self) -> frozenset[str]:
        """Return the addresses of its endpoints, without ports."""
        return frozenset(endpoint.host for endpoint in self.endpoints)

    def kind_of(self, address: str) -> InterfaceKind:
        """Return the kind of the interface that holds `address`, UNKNOWN if none does."""
        for interface in self.interfaces:
            if address in interface.addresses:
                return interface.kind
        return InterfaceKind.UNKNOWN


@dataclass(frozen=True)
class Link:
    """A directed, verified connection: `source` reached `sink` at `sink_address`."""

    source: str
    sink: str
    sink_address: str
    kind: InterfaceKind
    round_trip_ns: int

    @property
    def key(self) -> tuple[str, str, str]:
        """What makes it this link, and orders links."""
        return (self.source, self.sink, self.sink_address)


@dataclass(frozen=True)
class Topology:
    """Everything known at one revision: live nodes by id, links by key."""

    nodes: tuple[Node, ...]
    links: tuple[Link, ...]
    gathering: bool


@dataclass(frozen=True)
class Change:
    """The difference between two successive revisions.

    `links` are all links of the `relinked` sources. Removing a node removes all its links.
    """

    updated: tuple[Node, ...] = ()
    removed: tuple[str, ...] = ()
    relinked: tuple[str, ...] = ()
    links: tuple[Link, ...] = ()
    gathering: bool = False

    def weight(self) -> int:
        """Return how many nodes and links it holds, plus one."""
        return 1 + len(self.updated) + len(self.removed) + len(self.relinked) + len(self.links)


def in_order(links: Iterable[Link]) -> tuple[Link, ...]:
    """Return links ordered by source, sink and sink address."""
    return tuple(sorted(links, key=lambda link: link.key))
