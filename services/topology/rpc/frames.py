"""Answers as bytes, of which each node and link is turned into a message only once.

In a full mesh of 256 nodes a snapshot holds 65,280 links: made anew for every caller they would
take a second each. Encoded messages may be joined: the entries of a repeated field then simply
follow one another.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from google.protobuf.message import Message

from services.topology.domain.model import Change, Link, Node, Topology
from services.topology.rpc.convert import node_to_proto
from services.topology.rpc.convert_hardware import conflict_to_proto
from services.topology.rpc.convert_links import link_to_proto, misdirection_to_proto
from shardring.topology.v1 import topology_pb2 as pb
from shardring.topology.v1 import topology_service_pb2 as service_pb

# An encoded link is used for so long, and states the age that its throughput then has. With the
# usual heartbeat its source reports it anew before.
REUSE_SECONDS = 40.0
KEPT_CHANGES = 64
MAX_SOURCES = 4_096

OneWay = frozenset[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Encoded:
    """A link, and its bytes as part of a Topology."""

    link: Link
    one_way: bool
    until: float
    data: bytes


EncodedLinks = dict[int, Encoded]


@dataclass(frozen=True)
class _Source:
    """All links of one source: one by one, by the identity of each, and joined."""

    links: tuple[Link, ...]
    one_way: OneWay
    until: float
    encoded: EncodedLinks
    data: bytes


class Frames:
    """Encodes topologies and changes; remembers the newest parts."""

    def __init__(self) -> None:
        self._nodes: dict[int, tuple[Node, bytes]] = {}
        self._sources: dict[str, _Source] = {}
        # By revision and the identity of the change, which each entry holds: those who follow
        # nodes alone are told of several changes as one.
        self._changes: OrderedDict[tuple[int, int], tuple[Change, bytes]] = OrderedDict()

    def answer(self, revision: int, topology: Topology, now: float) -> bytes:
        """Return a GetTopologyResponse with the topology."""
        head = service_pb.GetTopologyResponse(revision=revision).SerializeToString()
        field = service_pb.GetTopologyResponse.TOPOLOGY_FIELD_NUMBER
        return head + _embedded(field, self._topology(topology, now))

    def snapshot(self, revision: int, topology: Topology, now: float) -> bytes:
        """Return a WatchTopologyResponse with the topology."""
        head = service_pb.WatchTopologyResponse(revision=revision).SerializeToString()
        field = service_pb.WatchTopologyResponse.SNAPSHOT_FIELD_NUMBER
        return head + _embedded(field, self._topology(topology, now))

    def change(self, revision: int, change: Change, now: float) -> bytes:
        """Return a WatchTopologyResponse with a change, made for the first who needs it."""
        key = (revision, id(change))
        held = self._changes.get(key)
        if held is None:
            held = self._changes[key] = (change, _part(_change(revision, change, now)))
            while len(self._changes) > KEPT_CHANGES:
                self._changes.popitem(last=False)
        return held[1]

    def keep(
        self, links: tuple[Link, ...], encoded: EncodedLinks, one_way: OneWay, now: float
    ) -> None:
        """Keep a source's new links as `encode` returned them, so that no reader waits for it."""
        if len(self._sources) >= MAX_SOURCES:
            self._sources.clear()  # nobody reads, which would leave out those that are gone
        if links:
            self._source(links, one_way, now, encoded)

    def _topology(self, topology: Topology, now: float) -> bytes:
        rest = pb.Topology(
            gathering=topology.gathering,
            misdirections=map(misdirection_to_proto, topology.misdirections),
            identity_conflicts=map(conflict_to_proto, topology.conflicts),
            probing_node_ids=topology.probing,
        )
        links = self._link_parts(topology, now)
        return b"".join((*self._node_parts(topology.nodes), *links, rest.SerializeToString()))

    def _node_parts(self, nodes: Iterable[Node]) -> Iterable[bytes]:
        held, self._nodes = self._nodes, {}
        for node in nodes:
            # The same object is the same node: it is held here, and cannot change.
            known = held.get(id(node)) or (node, _part(pb.Topology(nodes=[node_to_proto(node)])))
            self._nodes[id(node)] = known
            yield known[1]

    def _link_parts(self, topology: Topology, now: float) -> list[bytes]:
        current = [self._source(links, topology.one_way, now) for links in topology.links_by_source]
        self._sources = {source.links[0].source: source for source in current}
        return [source.data for source in current]

    def _source(
        self,
        links: tuple[Link, ...],
        one_way: OneWay,
        now: float,
        known: EncodedLinks | None = None,
    ) -> _Source:
        name = links[0].source
        held = self._sources.get(name)
        if (
            held is not None
            and held.links is links
            and held.one_way is one_way
            and held.until > now
        ):
            return held
        if known is None:
            known = {} if held is None else held.encoded
        encoded: EncodedLinks = {}
        for link in links:
            alone = bool(one_way) and (name, link.sink) in one_way
            one = known.get(id(link))
            if one is None or one.one_way is not alone or one.until <= now:
                one = _encoded(link, alone, now)
            encoded[id(link)] = one
        until = min(one.until for one in encoded.values())
        data = b"".join([one.data for one in encoded.values()])
        made = self._sources[name] = _Source(links, one_way, until, encoded, data)
        return made


def encode(links: Iterable[Link], now: float) -> EncodedLinks:
    """Return links encoded, as if each had its counterpart."""
    return {id(link): _encoded(link, False, now) for link in links}


def _encoded(link: Link, one_way: bool, now: float) -> Encoded:
    message = link_to_proto(link, now, one_way=one_way, ahead_seconds=REUSE_SECONDS)
    until = now + REUSE_SECONDS if link.throughput is not None else float("inf")
    return Encoded(link, one_way, until, _part(pb.Topology(links=[message])))


def _change(revision: int, change: Change, now: float) -> service_pb.WatchTopologyResponse:
    links = (
        link_to_proto(link, now, one_way=(link.source, link.sink) in change.one_way)
        for link in change.links
    )
    return service_pb.WatchTopologyResponse(
        revision=revision,
        change=service_pb.TopologyChange(
            updated_nodes=map(node_to_proto, change.updated),
            removed_node_ids=change.removed,
            relinked_source_node_ids=change.relinked,
            links=links,
            gathering=change.gathering,
            misdirections=map(misdirection_to_proto, change.misdirections),
            identity_conflicts=map(conflict_to_proto, change.conflicts),
            probing_node_ids=change.probing,
        ),
    )


def _part(message: Message) -> bytes:
    return message.SerializeToString()


def _embedded(field_number: int, data: bytes) -> bytes:
    """Return encoded bytes as a message-typed field: its tag, its length, itself."""
    return _varint(field_number << 3 | 2) + _varint(len(data)) + data


def _varint(number: int) -> bytes:
    """Return a number as protobuf writes it: seven bits a byte, lowest first."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)
