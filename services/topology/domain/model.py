"""What the topology is made of. All values are immutable."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum, auto
from functools import cached_property

from services.common.addresses import HostPort

# A throughput is told as current for this long, and measured anew well before.
THROUGHPUT_VALID_SECONDS = 900.0


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
class ThunderboltPort:
    """A Thunderbolt port; meanings as in shardring.topology.v1.ThunderboltPort."""

    interface: str
    domain: str
    peer_domains: tuple[str, ...] = ()
    link_bits_per_second: int = 0
    generation: int = 0
    bridge: str = ""


@dataclass(frozen=True)
class RdmaDevice:
    """A device for remote direct memory access, and the interface it belongs to ("": unknown)."""

    name: str
    interface: str = ""


@dataclass(frozen=True)
class Rdma:
    """Whether RDMA may be used on a machine, and the devices that can carry it."""

    enabled: bool = False
    devices: tuple[RdmaDevice, ...] = ()


@dataclass(frozen=True)
class Speed:
    """What a node's runner measured once that it reaches; 0: not calibrated."""

    weight_bytes_per_second: int = 0
    multiply_adds_per_second: int = 0


@dataclass(frozen=True)
class Node:
    """One machine. Times are nanoseconds since 1970; `start_ns` numbers the run of the node.

    `start_ns` is on the node's own clock and only ever compared with other runs of the same node;
    `last_report_ns` is on the service's clock, 0 where not set. `fingerprint` tells the machine and
    its data folder from any other; "" where it is not known.
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
    fingerprint: str = ""
    rdma: Rdma = Rdma()
    thunderbolt_ports: tuple[ThunderboltPort, ...] = ()
    speed: Speed = Speed()

    def described(self) -> str:
        """Return the node's name and first endpoint, for messages to people."""
        return f"{self.name} ({self.endpoints[0]})" if self.endpoints else self.name

    def hosts(self) -> frozenset[str]:
        """Return the addresses of its endpoints, without ports."""
        return frozenset(endpoint.host for endpoint in self.endpoints)

    @cached_property
    def places(self) -> frozenset[tuple[str, int]]:
        """Its endpoints as plain pairs of address and port, which are quickly looked up."""
        return frozenset((endpoint.host, endpoint.port) for endpoint in self.endpoints)

    def interface_at(self, address: str) -> Interface | None:
        """Return the interface that holds `address`, None if none does."""
        for interface in self.interfaces:
            if address in interface.addresses:
                return interface
        return None

    def kind_of(self, address: str) -> InterfaceKind:
        """Return the kind of the interface that holds `address`, UNKNOWN if none does."""
        interface = self.interface_at(address)
        return InterfaceKind.UNKNOWN if interface is None else interface.kind


@dataclass(frozen=True, slots=True)
class Throughput:
    """What a burst reached, and when: seconds on the monotonic clock of the process holding it."""

    bytes_per_second: int
    measured_at: float

    def is_current(self, now: float) -> bool:
        """Say whether it may still be told as what the link carries."""
        return now - self.measured_at <= THROUGHPUT_VALID_SECONDS


@dataclass(frozen=True, slots=True)
class Link:
    """A directed, verified connection: `source` reached `sink` at `sink_address`.

    `round_trip_ns` is the fastest and `round_trip_median_ns` the median of the recent probes.
    `sink_port` is 0 and `source_interface` "" where not known.
    """

    source: str
    sink: str
    sink_address: str
    kind: InterfaceKind
    round_trip_ns: int
    round_trip_median_ns: int = 0
    throughput: Throughput | None = None
    sink_port: int = 0
    source_interface: str = ""
    rdma_device: str = ""  # set by the service

    @property
    def key(self) -> tuple[str, str, str]:
        """What makes it this link, and orders links."""
        return (self.source, self.sink, self.sink_address)


@dataclass(frozen=True, slots=True)
class Misdirection:
    """`source` found `answered` where `expected` says it listens; "": no proof of who it was."""

    source: str
    expected: str
    answered: str
    address: str
    port: int

    @property
    def key(self) -> tuple[str, str, str, int]:
        """What makes it this one, and orders them."""
        return (self.source, self.expected, self.address, self.port)


@dataclass(frozen=True)
class IdentityConflict:
    """Two machines with one node id: which of them is listed, and which one is refused."""

    node_id: str
    held_by: str
    claimed_by: str


@dataclass(frozen=True)
class Topology:
    """Everything known at one revision: live nodes by id, links and misdirections by key.

    `one_way` are the (source, sink) pairs that no link leads back from.
    """

    nodes: tuple[Node, ...]
    links_by_source: tuple[tuple[Link, ...], ...]
    gathering: bool
    conflicts: tuple[IdentityConflict, ...] = ()
    misdirections: tuple[Misdirection, ...] = ()
    one_way: frozenset[tuple[str, str]] = frozenset()
    # Nodes that have not asked every address of the others yet; ordered.
    probing: tuple[str, ...] = ()

    @property
    def links(self) -> tuple[Link, ...]:
        """Return all links, in order."""
        return tuple(link for links in self.links_by_source for link in links)


@dataclass(frozen=True)
class Change:
    """The difference between two successive revisions.

    `links` and `misdirections` are all those of the `relinked` sources, and `one_way` the pairs of
    `links` that no link leads back from. Removing a node removes all its links.
    """

    updated: tuple[Node, ...] = ()
    removed: tuple[str, ...] = ()
    relinked: tuple[str, ...] = ()
    links: tuple[Link, ...] = ()
    gathering: bool = False
    conflicts: tuple[IdentityConflict, ...] = ()
    misdirections: tuple[Misdirection, ...] = ()
    one_way: frozenset[tuple[str, str]] = frozenset()
    # Nodes that have not asked every address of the others yet; ordered.
    probing: tuple[str, ...] = ()

    def weight(self) -> int:
        """Return how many nodes, links and other entries it holds, plus one."""
        held = (self.updated, self.removed, self.relinked, self.links, self.conflicts)
        return 1 + sum(len(items) for items in (*held, self.misdirections))


def in_order(links: Iterable[Link]) -> tuple[Link, ...]:
    """Return links ordered by source, sink and sink address."""
    return tuple(sorted(links, key=lambda link: link.key))
