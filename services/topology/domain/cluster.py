"""Nodes with leases and the links they observed, from reports to revisions. No I/O, no clock."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from services.common.errors import Reason, ShardringError
from services.topology.domain.model import Change, Link, Node, Topology, in_order
from services.topology.domain.rules import check_links, check_node, check_node_id, not_advertised
from services.topology.domain.significance import differs, drifted


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
        # By source: all it reported; the part between live nodes at addresses that the sink
        # advertises; and that part as it was when last announced to watchers.
        self._observed: dict[str, tuple[Link, ...]] = {}
        self._visible: dict[str, tuple[Link, ...]] = {}
        self._announced: dict[str, tuple[Link, ...]] = {}

    def topology(self) -> Topology:
        """Return everything known, with the newest figures."""
        return Topology(
            nodes=tuple(self._members[node_id].node for node_id in sorted(self._members)),
            links=tuple(link for source in sorted(self._visible) for link in self._visible[source]),
            gathering=self.gathering,
        )

    def report_node(self, node: Node, now: float) -> Change | None:
        """Take a node's report and renew its lease.

        A later `start_ns` takes the place of an earlier run at once; its links count as
        unverified until it reports them. An earlier one than that of a live node comes from a
        second machine with the same id: NODE_ID_DUPLICATE names both. Also raises INVALID_FIELD.
        """
        check_node(node)
        member = self._members.get(node.node_id)
        if member is not None and node.start_ns < member.node.start_ns:
            raise _duplicate(member.node, node.described())
        held = None if member is None else member.node
        lease_end = now + self.lease_seconds
        if member is not None and not differs(member.node, member.announced_memory_bytes, node):
            member.node, member.lease_end = node, lease_end
            return None
        self._members[node.node_id] = _Member(node, lease_end, node.memory_available_bytes)
        if held is not None and held.start_ns != node.start_ns:
            self._observed.pop(node.node_id, None)
        if held is not None and held.endpoints != node.endpoints:
            # An address that moved to another port has to be verified again.
            gone = {e.host for e in set(held.endpoints) - set(node.endpoints)}
            self._forget(lambda link: link.sink == node.node_id and link.sink_address in gone)
        moved = held is None or held.start_ns != node.start_ns or held.endpoints != node.endpoints
        return self._changed(updated=(node,), sources=None if moved else ())

    def report_links(
        self, source: str, start_ns: int | None, links: Sequence[Link]
    ) -> Change | None:
        """Replace the links that `source` observed.

        `start_ns` names the run of the source that observed them, if known. Raises INVALID_FIELD,
        NODE_NOT_FOUND, and NODE_ID_DUPLICATE when another run holds the source's lease.
        """
        check_links(source, links, lab=self._lab)
        member = self._members.get(source)
        if member is None:
            raise _not_found(source)
        if start_ns is not None and start_ns != member.node.start_ns:
            raise _duplicate(member.node, "another run of the node")
        for index, link in enumerate(links):
            sink = self._members.get(link.sink)
            if sink is not None and link.sink_address not in sink.node.hosts():
                raise not_advertised(index, link)
        self._observed[source] = in_order(links)
        visible = self._visible_from(source)
        if not drifted(self._announced.get(source, ()), visible):
            self._visible[source] = visible
            return None
        return self._changed(sources=[source])

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
        return self._removed(ended) if ended or gathered else None

    def next_expiry(self) -> float | None:
        """Return when `expire` next has something to do; None: nothing is due."""
        ends = [member.lease_end for member in self._members.values()]
        if self.gathering:
            ends.append(self._gathering_end)
        return min(ends, default=None)

    def _removed(self, node_ids: Sequence[str]) -> Change:
        gone = frozenset(node_ids)
        for node_id in node_ids:
            del self._members[node_id]
            for links in (self._observed, self._visible, self._announced):
                links.pop(node_id, None)
        self._forget(lambda link: link.sink in gone)
        # Watchers know that a node takes its links along: they are not announced again.
        for source in self._announced:
            self._announced[source] = tuple(
                link for link in self._announced[source] if link.sink not in gone
            )
        return self._changed(removed=tuple(sorted(gone)))

    def _forget(self, is_gone: Callable[[Link], bool]) -> None:
        for source, links in self._observed.items():
            self._observed[source] = tuple(link for link in links if not is_gone(link))

    def _changed(
        self,
        *,
        updated: tuple[Node, ...] = (),
        removed: tuple[str, ...] = (),
        sources: Iterable[str] | None = None,
    ) -> Change:
        """Count a revision, and find which sources' links now look different.

        `sources`: those whose links may; None: any of them.
        """
        self.revision += 1
        candidates = {*self._observed, *self._visible} if sources is None else sources
        relinked = []
        for source in sorted(candidates):
            self._visible[source] = visible = self._visible_from(source)
            if drifted(self._announced.get(source, ()), visible):
                self._announced[source] = visible
                relinked.append(source)
        return Change(
            updated=updated,
            removed=removed,
            relinked=tuple(relinked),
            links=tuple(link for source in relinked for link in self._visible[source]),
            gathering=self.gathering,
        )

    def _visible_from(self, source: str) -> tuple[Link, ...]:
        return tuple(
            link
            for link in self._observed.get(source, ())
            if (sink := self._members.get(link.sink)) and link.sink_address in sink.node.hosts()
        )


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
