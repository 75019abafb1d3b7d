"""The use cases of the topology service."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

from services.topology.domain.cluster import Cluster
from services.topology.domain.model import Change, Link, Node, Topology
from services.topology.watch import ChangeLog

# Heartbeats in a row that a node may miss before it counts as gone.
LEASE_HEARTBEATS = 3


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

    @property
    def revision(self) -> int:
        """The current revision."""
        return self._cluster.revision

    def report_node(self, node: Node) -> None:
        """Take a node's report and renew its lease; errors as Cluster.report_node."""
        node = replace(node, last_report_ns=time.time_ns())
        self._tell(self._cluster.report_node(node, time.monotonic()))

    def report_links(self, source: str, start_ns: int | None, links: Sequence[Link]) -> None:
        """Replace the links of one source; errors as Cluster.report_links."""
        self._tell(self._cluster.report_links(source, start_ns, links))

    def remove_node(self, node_id: str) -> None:
        """Forget a node at once. Raises NODE_NOT_FOUND."""
        self._tell(self._cluster.remove_node(node_id))

    def topology(self) -> Topology:
        """Return everything known at the current revision."""
        return self._cluster.topology()

    def watch(self, after_revision: int | None) -> AsyncGenerator[tuple[int, Topology | Change]]:
        """Follow the topology; see ChangeLog.follow."""
        return self._log.follow(after_revision, self._cluster.topology)

    async def run_leases(self) -> None:
        """Remove nodes as their leases end, until cancelled."""
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

    def _tell(self, change: Change | None) -> None:
        if change is not None:
            self._log.append(change)
