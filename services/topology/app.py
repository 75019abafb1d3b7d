"""The use cases of the topology service."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

from services.common.errors import Reason, ShardringError
from services.topology.domain.cluster import Cluster
from services.topology.domain.model import Change, Link, Misdirection, Node, Topology
from services.topology.watch import ChangeLog, NodeLog

# Heartbeats in a row that a node may miss before it counts as gone.
LEASE_HEARTBEATS = 3
# How soon the links of many nodes that came at once are looked at, and how many times as long as
# that took is waited before it is done again.
SETTLE_SECONDS = 0.1
SETTLE_REST = 4


class TopologyApp:
    """Leases, links and watches, on this process's monotonic clock."""

    def __init__(self, *, heartbeat_seconds: float, lab: bool) -> None:
        self.heartbeat_seconds = heartbeat_seconds
        self.lease_seconds = LEASE_HEARTBEATS * heartbeat_seconds
        # Milliseconds since 1970: above anything an earlier process reached, unless it made over
        # a thousand changes a second all its life.
        revision = time.time_ns() // 1_000_000
        self._cluster = Cluster(
            first_revision=revision,
            lease_seconds=self.lease_seconds,
            now=time.monotonic(),
            lab=lab,
        )
        self._log = ChangeLog(revision)
        self._node_log = NodeLog(revision)
        self._unsettled = asyncio.Event()

    @property
    def revision(self) -> int:
        """The current revision."""
        return self._cluster.revision

    def report_node(self, node: Node) -> None:
        """Take a node's report and renew its lease; errors as Cluster.report_node."""
        node = replace(node, last_report_ns=time.time_ns())
        now = time.monotonic()
        try:
            self._tell(self._cluster.report_node(node, now))
            if self._cluster.unsettled:
                self._unsettled.set()
        except ShardringError as error:
            if error.reason is Reason.NODE_ID_DUPLICATE:
                self._tell(self._cluster.note_claim(node, now))
            raise

    def wants_links(self, node_id: str) -> bool:
        """Say whether the present run of a live node has not reported its links yet."""
        return self._cluster.wants_links(node_id)

    def report_links(
        self,
        source: str,
        start_ns: int | None,
        links: Sequence[Link],
        misdirections: Sequence[Misdirection],
        *,
        probing: bool = False,
    ) -> None:
        """Replace the links of one source; errors as Cluster.report_links."""
        self._tell(
            self._cluster.report_links(source, start_ns, links, misdirections, probing=probing)
        )

    def remove_node(self, node_id: str) -> None:
        """Forget a node at once. Raises NODE_NOT_FOUND."""
        self._tell(self._cluster.remove_node(node_id))

    def links_of(self, source: str) -> tuple[Link, ...]:
        """Return the links of one source as they are served."""
        return self._cluster.links_of(source)

    def one_way(self) -> frozenset[tuple[str, str]]:
        """Return the (source, sink) pairs that no link leads back from."""
        return self._cluster.one_way()

    def topology(self) -> Topology:
        """Return everything known at the current revision."""
        return self._cluster.topology()

    def watch(
        self, after_revision: int | None, *, without_links: bool
    ) -> AsyncGenerator[tuple[int, Topology | Change]]:
        """Follow the topology; see ChangeLog.follow, and NodeLog.follow without links."""
        log = self._node_log if without_links else self._log
        return log.follow(after_revision, self._cluster.topology)

    async def run(self) -> None:
        """Do what time brings, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._run_leases(), name="leases")
            group.create_task(self._run_settling(), name="settling")

    async def _run_settling(self) -> None:
        while True:
            await self._unsettled.wait()
            self._unsettled.clear()
            await asyncio.sleep(SETTLE_SECONDS)
            began = time.monotonic()
            self._tell(self._cluster.settle())
            # So that it never takes more than a part of this process's time.
            await asyncio.sleep(SETTLE_REST * (time.monotonic() - began))

    async def _run_leases(self) -> None:
        """Remove nodes as their leases end."""
        while True:
            # A lease that begins meanwhile ends no sooner than one lease from now.
            due = time.monotonic() + self.lease_seconds
            due = min(due, self._cluster.next_expiry() or due)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            if time.monotonic() - due > self.heartbeat_seconds:
                # This process stood still: first hear what the nodes have reported since.
                await asyncio.sleep(self.heartbeat_seconds)
            self._tell(self._cluster.expire(time.monotonic()))

    def close(self) -> None:
        """End all watches."""
        self._log.close()
        self._node_log.close()

    def _tell(self, change: Change | None) -> None:
        if change is not None:
            self._log.append(change)
            self._node_log.append(self._cluster.revision, change)
