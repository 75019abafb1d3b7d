"""Nodes with leases and the links they observed, from reports to revisions. No I/O, no clock."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from services.common.errors import Reason, ShardringError
from services.topology.domain.conflicts import Conflicts
from services.topology.domain.links import LinkTable, Relinked, advertised
from services.topology.domain.model import Change, Link, Misdirection, Node, Topology
from services.topology.domain.rules import (
    check_links,
    check_misdirections,
    check_node,
    check_node_id,
    not_advertised,
)
from services.topology.domain.significance import differs

# How many links a single report may cause to be looked at again.
MAX_LINKS_AT_ONCE = 4_096


@dataclass
class _Member:
    """A live node: its newest report, when its lease ends, and the memory last announced."""

    node: Node
    lease_end: float
    announced_memory_bytes: int


class Cluster:
    """The soft state of the topology service.

    `now` is always in seconds on one monotonic clock of the service: the clocks of the nodes play
    no part. A method that changes what watchers see raises `revision` by one and returns the
    change; others return None.
    """

    def __init__(
        self, *, first_revision: int, lease_seconds: float, now: float, lab: bool = False
    ) -> None:
        self.revision = first_revision
        self.gathering = True
        self.lease_seconds = lease_seconds
        self._gathering_end = now + lease_seconds
        self._lab = lab
        self._members: dict[str, _Member] = {}
        self._conflicts = Conflicts(lease_seconds)
        self._links = LinkTable(self._node)
        self._unsettled: set[str] = set()

    def topology(self) -> Topology:
        """Return everything known, with the newest figures."""
        return Topology(
            nodes=tuple(self._members[node_id].node for node_id in sorted(self._members)),
            links_by_source=self._links.links_by_source(),
            gathering=self.gathering,
            conflicts=self._conflicts.listed(),
            misdirections=self._links.misdirections(),
            one_way=self._links.one_way(),
            probing=self._probing(),
        )

    def links_of(self, source: str) -> tuple[Link, ...]:
        """Return the links of one source as they are served."""
        return self._links.links_of(source)

    def one_way(self) -> frozenset[tuple[str, str]]:
        """Return the (source, sink) pairs that no link leads back from."""
        return self._links.one_way()

    def wants_links(self, node_id: str) -> bool:
        """Say whether the present run of a node has not reported its links yet."""
        return not self._links.has_report(node_id)

    def report_node(self, node: Node, now: float) -> Change | None:
        """Take a node's report and renew its lease.

        A later `start_ns` takes the place of an earlier run at once; its links count as
        unverified until it reports them. Another fingerprint than that of a live node, or an
        earlier start, comes from a second machine with the same id: NODE_ID_DUPLICATE names both,
        and what is listed stays (see `note_claim`). Also raises INVALID_FIELD.

        In a large cluster the links that others observed of the node are looked at by `settle`.
        """
        check_node(node)
        member = self._members.get(node.node_id)
        if member is not None and _is_another(member.node, node):
            raise _duplicate(member.node, node.described())
        held = None if member is None else member.node
        concerned = self._links.concerned(node.node_id)
        lease_end = now + self.lease_seconds
        if member is not None and not differs(member.node, member.announced_memory_bytes, node):
            member.node, member.lease_end = node, lease_end
            return None
        self._members[node.node_id] = _Member(node, lease_end, node.memory_available_bytes)
        if held is not None and held.start_ns != node.start_ns:
            self._links.withdraw(node.node_id)
        if held is not None and held.endpoints != node.endpoints:
            # An address that moved to another port has to be verified again.
            self._links.withdraw_places(node.node_id, held.places - node.places)
        moved = held is None or _link_facts(held) != _link_facts(node)
        if moved and self._links.count(concerned) > MAX_LINKS_AT_ONCE:
            self._unsettled |= concerned
            moved = False
        return self._changed(updated=(node,), sources=concerned if moved else ())

    @property
    def unsettled(self) -> bool:
        """True while `settle` has something to do."""
        return bool(self._unsettled)

    def settle(self) -> Change | None:
        """Look at the links of all nodes that came or moved since, together.

        When a service restarts among n nodes, each of them comes to where all others have already
        observed it: one by one, that would take n times as long as together.
        """
        relinked = self._links.announce(self._unsettled)
        self._unsettled = set()
        return self._changed(relinked=relinked) if relinked.sources else None

    def note_claim(self, node: Node, now: float) -> Change | None:
        """List a node that `report_node` has refused as a duplicate, for a while."""
        held = self._members[node.node_id].node
        noted = self._conflicts.note(node.node_id, held.described(), node.described(), now)
        return self._changed() if noted else None

    def report_links(
        self,
        source: str,
        start_ns: int | None,
        links: Sequence[Link],
        misdirections: Sequence[Misdirection] = (),
        *,
        probing: bool = False,
    ) -> Change | None:
        """Replace the links and misdirections that `source` observed; `probing`: so far.

        `start_ns` names the run of the source that observed them, if known. Raises INVALID_FIELD,
        NODE_NOT_FOUND, and NODE_ID_DUPLICATE when another run holds the source's lease.
        """
        check_links(source, links, lab=self._lab)
        check_misdirections(source, misdirections)
        member = self._members.get(source)
        if member is None:
            raise _not_found(source)
        if start_ns is not None and start_ns != member.node.start_ns:
            raise _duplicate(member.node, "another run of the node")
        for index, link in enumerate(links):
            sink = self._node(link.sink)
            # At another port it only just moved there or from there: not shown, but no fault.
            if (
                sink is not None
                and not advertised(sink, link)
                and link.sink_address not in sink.hosts()
            ):
                raise not_advertised(index, link)
        worth_telling = self._links.report(source, links, misdirections, probing=probing)
        return self._changed(sources=[source]) if worth_telling else None

    def remove_node(self, node_id: str) -> Change:
        """Forget a node and its links. Raises INVALID_FIELD and NODE_NOT_FOUND."""
        check_node_id(node_id, "node_id")
        if node_id not in self._members:
            raise _not_found(node_id)
        return self._removed([node_id])

    def expire(self, now: float) -> Change | None:
        """Forget all nodes whose lease has ended; end the gathering when its time is over."""
        ended = [node_id for node_id, member in self._members.items() if member.lease_end <= now]
        gathered = self.gathering and self._gathering_end <= now
        if gathered:
            self.gathering = False
        settled = self._conflicts.expire(now)
        return self._removed(ended) if ended or gathered or settled else None

    def next_expiry(self) -> float | None:
        """Return when `expire` next has something to do; None: nothing is due."""
        ends = [member.lease_end for member in self._members.values()]
        ends += self._conflicts.ends()
        if self.gathering:
            ends.append(self._gathering_end)
        return min(ends, default=None)

    def _removed(self, node_ids: Sequence[str]) -> Change:
        gone = frozenset(node_ids)
        for node_id in node_ids:
            del self._members[node_id]
            self._conflicts.drop(node_id)
        self._links.remove(gone)
        return self._changed(removed=tuple(sorted(gone)))

    def _probing(self) -> tuple[str, ...]:
        return tuple(
            node_id for node_id in sorted(self._members) if self._links.is_probing(node_id)
        )

    def _node(self, node_id: str) -> Node | None:
        member = self._members.get(node_id)
        return None if member is None else member.node

    def _changed(
        self,
        *,
        updated: tuple[Node, ...] = (),
        removed: tuple[str, ...] = (),
        sources: Iterable[str] = (),
        relinked: Relinked | None = None,
    ) -> Change:
        """Count a revision; `sources` are those whose links may now look different."""
        self.revision += 1
        relinked = relinked or self._links.announce(sources)
        return Change(
            updated=updated,
            removed=removed,
            relinked=relinked.sources,
            links=relinked.links,
            gathering=self.gathering,
            conflicts=self._conflicts.listed(),
            misdirections=relinked.misdirections,
            one_way=relinked.one_way,
            probing=self._probing(),
        )


def _is_another(held: Node, node: Node) -> bool:
    """Say whether a report is by another machine, or an earlier run, than the live node's."""
    if held.fingerprint and node.fingerprint and held.fingerprint != node.fingerprint:
        return True
    return node.start_ns < held.start_ns


def _link_facts(node: Node) -> tuple[object, ...]:
    """Return what decides which links of a node, and to it, are shown, and how."""
    return (node.start_ns, node.endpoints, node.rdma, node.thunderbolt_ports)


def _not_found(node_id: str) -> ShardringError:
    return ShardringError(
        Reason.NODE_NOT_FOUND, f"No live node has id {node_id}.", metadata={"node_id": node_id}
    )


def _duplicate(held: Node, claimed_by: str) -> ShardringError:
    return ShardringError(
        Reason.NODE_ID_DUPLICATE,
        f"Node id {held.node_id} is held by {held.described()} and also claimed by {claimed_by}. "
        "If one disk was cloned from the other, delete the file node-id from the data folder of "
        "one of them and restart it.",
        metadata={
            "node_id": held.node_id,
            "held_by": held.described(),
            "claimed_by": claimed_by,
        },
    )
