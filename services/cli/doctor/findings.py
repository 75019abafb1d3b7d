"""What the rules work on, and what they find. Plain data."""

from collections.abc import Sequence
from dataclasses import dataclass

from services.cli.names import NodeNames, names_of_nodes
from services.cli.render.nodes import kind_name, round_trip_seconds
from services.cli.text import duration, speed
from shardring.runner.v1 import runner_pb2
from shardring.topology.v1 import topology_pb2


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or, as a `note`, worth knowing.

    `code` names the kind for programs. `text` says what is, `remedy` what to do; `node_ids` are
    the nodes concerned.
    """

    code: str
    text: str
    remedy: str = ""
    node_ids: tuple[str, ...] = ()
    note: bool = False


@dataclass(frozen=True)
class Probe:
    """What happened when this machine dialled one address of a node.

    `error`: the operating system's number for it; None where it answered, or stayed silent.
    `on_subnet`: an interface of this machine is in the same network.
    """

    node_id: str
    address: str
    answered: bool
    error: int | None = None
    on_subnet: bool = False


@dataclass(frozen=True)
class LocalFacts:
    """What can only be seen from the machine that asks."""

    platform: str = ""
    probes: tuple[Probe, ...] = ()


class View:
    """A topology, with what rules look up again and again; and the instances that run on it."""

    def __init__(
        self,
        topology: topology_pb2.Topology,
        local: LocalFacts | None = None,
        instances: Sequence[runner_pb2.Instance] = (),
    ) -> None:
        self.topology = topology
        self.local = local or LocalFacts()
        self.instances = instances
        self.names: NodeNames = names_of_nodes(topology.nodes)
        self.nodes = {node.node_id: node for node in topology.nodes}
        self.links: dict[tuple[str, str], list[topology_pb2.Link]] = {}
        for link in topology.links:
            self.links.setdefault((link.source_node_id, link.sink_node_id), []).append(link)

    def label(self, node_id: str) -> str:
        """Return a node's name, or the beginning of its id."""
        return self.names.label(node_id)

    def both_ways(self, one: str, other: str) -> bool:
        """Return whether two nodes are linked in both directions."""
        return (one, other) in self.links and (other, one) in self.links

    def best(self, source: str, sink: str) -> topology_pb2.Link | None:
        """Return the fastest link from one node to another."""
        return min(self.links.get((source, sink), ()), key=cost_seconds, default=None)


# A message as large as what a rank hands on for a prompt of a few hundred tokens.
_MESSAGE_BYTES = 1_000_000
# Where no speed was measured: what a kind can be expected to carry, in bytes a second.
_USUAL = {
    topology_pb2.INTERFACE_KIND_THUNDERBOLT: 1_000_000_000,
    topology_pb2.INTERFACE_KIND_MAYBE_ETHERNET: 110_000_000,
    topology_pb2.INTERFACE_KIND_ETHERNET: 110_000_000,
    topology_pb2.INTERFACE_KIND_WIFI: 25_000_000,
}
_USUAL_OTHERWISE = 10_000_000


def cost_seconds(link: topology_pb2.Link) -> float:
    """Return about how long a message takes: half a round trip, and its bytes at the link's speed.

    An estimate to compare paths with; both figures are the measured ones where there are any.
    """
    bytes_per_second = _USUAL.get(link.kind, _USUAL_OTHERWISE)
    if link.HasField("throughput_bytes_per_second") and link.throughput_bytes_per_second:
        bytes_per_second = link.throughput_bytes_per_second
    return round_trip_seconds(link) / 2 + _MESSAGE_BYTES / bytes_per_second


def path(link: topology_pb2.Link) -> str:
    """Return a link in words: "wifi at 10.0.0.2 (4.1 ms, 0.2 Gbit/s)"."""
    figures = duration(round_trip_seconds(link))
    if link.HasField("throughput_bytes_per_second"):
        figures += f", {speed(link.throughput_bytes_per_second)}"
    return f"{kind_name(link.kind)} at {link.sink_address} ({figures})"
