"""The topology agent of a node: reports, watches its peers, and probes them."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field

from services.common.addresses import HostPort
from services.common.channel import Remote
from services.common.errors import Reason, ShardringError
from services.topology.agent.bursts import BurstGate
from services.topology.agent.identity import Identity
from services.topology.agent.peers import Peers
from services.topology.agent.prober import Prober
from services.topology.agent.report import MemoryRules, Reporter
from services.topology.domain.addresses import IpNetwork
from services.topology.domain.model import Change, Link, Node, Speed, Topology
from services.topology.domain.significance import drifted
from services.topology.rpc.convert import (
    event_from_proto,
    heartbeat_seconds_from_proto,
    links_request_to_proto,
    node_to_proto,
)
from shardring.topology.v1 import topology_service_pb2 as pb
from shardring.topology.v1.topology_service_pb2_grpc import TopologyServiceStub

logger = logging.getLogger(__name__)

# Until the service says how often to report.
FIRST_HEARTBEAT_SECONDS = 3.0
MIN_HEARTBEAT_SECONDS = 0.1
# Links that come or go are told at once, figures that differ much with the next heartbeat, and all
# after so many heartbeats.
REFRESH_HEARTBEATS = 10
# Links that change within this time are reported together.
GATHER_SECONDS = 0.05
RECONNECT_SECONDS = 1.0
LEAVE_SECONDS = 1.0
_UNREACHABLE = frozenset({Reason.SERVICE_UNAVAILABLE, Reason.SERVICE_TIMEOUT})


@dataclass(frozen=True)
class AgentOptions:
    """What the agent has to know.

    `listen` is the address the node's own server listens on, with its real port. `name` is for
    people; empty: the host name. `lab`: nodes on one machine reach each other over loopback.
    `networks`: where links may be; none: everywhere.
    `gate` is the one of the node's own server (see `identity_registration`); None: one of its own.
    `speed` answers what the node is known to reach by now.
    """

    topology: HostPort
    identity: Identity
    listen: HostPort
    name: str = ""
    lab: bool = False
    networks: tuple[IpNetwork, ...] = ()
    memory: MemoryRules = field(default_factory=MemoryRules)
    gate: BurstGate | None = None
    speed: Callable[[], Speed] = Speed


class TopologyAgent:
    """Keeps a node in the topology while `run` runs.

    `registered` is set while the topology service holds this node's lease as far as is known:
    from the first accepted report on, until one is refused. `refusal` is why the last report was
    refused or failed; None when it was accepted.
    """

    def __init__(self, options: AgentOptions) -> None:
        self.registered = asyncio.Event()
        self.refusal: ShardringError | None = None
        self._identity = options.identity
        self._reporter = Reporter(
            options.identity,
            name=options.name,
            listen=options.listen,
            memory=options.memory,
            lab=options.lab,
            speed=options.speed,
        )
        self._remote = Remote("topology", [options.topology])
        self._stub = TopologyServiceStub(self._remote.channel)
        self._heartbeat_seconds = FIRST_HEARTBEAT_SECONDS
        self._peers = Peers()
        self._claims: set[str] = set()
        # Whether the service has said who the others are.
        self._introduced = False
        self._own: Node | None = None
        self._report_now = asyncio.Event()
        self._links_changed = asyncio.Event()
        self._links_lock = asyncio.Lock()
        self._links_failures = 0
        # Heartbeats until links are told although they are the same.
        self._refresh_in = 0
        self._told: tuple[Link, ...] = ()
        self._prober = Prober(
            options.identity.node_id,
            lab=options.lab,
            networks=options.networks,
            gate=options.gate or BurstGate(options.identity.node_id),
            on_change=self._links_changed.set,
            on_figures=self._refresh_links,
        )

    def links(self) -> tuple[Link, ...]:
        """Return this node's links to others, as verified and measured now."""
        return self._prober.links()

    async def run(self) -> None:
        """Report, watch and probe until cancelled; then leave the topology and close everything.

        An unreachable topology service is waited for, and told everything once it is back.
        """
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._heartbeats(), name="heartbeats")
                group.create_task(self._report_changed_links(), name="link reports")
                group.create_task(self._watch(), name="topology watch")
                group.create_task(self._prober.run(lambda: self._heartbeat_seconds), name="probes")
                group.create_task(self._prober.run_bursts(), name="bursts")
        finally:
            if self.registered.is_set():
                self.registered.clear()
                await self._leave()
            await self._remote.close()

    async def _heartbeats(self) -> None:
        while True:
            self._report_now.clear()
            next_report = time.monotonic() + self._heartbeat_seconds
            try:
                await self._report()
            except (ShardringError, OSError) as error:
                self._note_refusal(error)
            else:
                self._refresh_in -= 1
                if self._refresh_in <= 0 or drifted(self._told, self._prober.links()):
                    await self._report_links()
            pause = min(next_report - time.monotonic(), self._heartbeat_seconds)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(MIN_HEARTBEAT_SECONDS, pause)):
                    await self._report_now.wait()

    async def _report(self) -> None:
        node = await asyncio.to_thread(self._reporter.node)
        if self._own is None or _probing_facts(self._own) != _probing_facts(node):
            self._own = node
            self._prober.set_peers(node, list(self._peers.nodes.values()))
        response = await self._remote.unary(
            self._stub.ReportNode,
            pb.ReportNodeRequest(node=node_to_proto(node)),
            timeout=max(1.0, self._heartbeat_seconds),
            # A first failure says at once what is wrong; then wait for the connection, so that a
            # service that comes back hears from this node as soon as it is there.
            wait_for_ready=self.refusal is not None,
        )
        self._heartbeat_seconds = max(MIN_HEARTBEAT_SECONDS, heartbeat_seconds_from_proto(response))
        if self.refusal is not None or not self.registered.is_set():
            logger.info("Registered with topology at %s as %s", self._remote.address, node.name)
        self.refusal = None
        self.registered.set()
        if response.links_wanted:
            self._refresh_links()

    def _refresh_links(self) -> None:
        """Have the links told with this or the next heartbeat."""
        self._refresh_in = 0

    async def _report_changed_links(self) -> None:
        while True:
            await self._links_changed.wait()
            await self.registered.wait()
            await asyncio.sleep(GATHER_SECONDS)
            await self._report_links()

    async def _report_links(self) -> None:
        """Report all links; what fails is told again with the next heartbeat."""
        # One at a time, so that an older report never arrives after a newer one.
        async with self._links_lock:
            self._links_changed.clear()
            self._refresh_in = REFRESH_HEARTBEATS
            self._told = self._prober.links()
            request = links_request_to_proto(
                self._identity.node_id,
                self._identity.start_ns,
                self._told,
                self._prober.misdirections(),
                time.monotonic(),
                probing=self._own is None or not (self._introduced and self._prober.has_asked_all),
            )
            try:
                await self._remote.unary(
                    self._stub.ReportLinks, request, timeout=max(1.0, self._heartbeat_seconds)
                )
                self._links_failures = 0
            except ShardringError as error:
                # One failure is no news: a peer may just have moved to another address.
                self._refresh_links()
                self._links_failures += 1
                if self._links_failures == 2:
                    logger.warning("Links are not taken by topology: %s", error.message)

    async def _leave(self) -> None:
        """Say that this node is going, rather than let its lease end."""
        try:
            await self._remote.unary(
                self._stub.RemoveNode,
                pb.RemoveNodeRequest(node_id=self._identity.node_id),
                timeout=LEAVE_SECONDS,
            )
        except ShardringError as error:
            logger.info("Topology was not told that this node stops: %s", error.message)

    def _note_refusal(self, error: ShardringError | OSError) -> None:
        if isinstance(error, OSError):
            error = ShardringError(Reason.INTERNAL, f"Cannot read this node's addresses: {error}")
        known = self.refusal is not None and self.refusal.reason is error.reason
        if self.refusal is not None and {self.refusal.reason, error.reason} <= _UNREACHABLE:
            return  # nothing new, and the first words said it best
        self.refusal = error
        refused = error.reason in (Reason.NODE_ID_DUPLICATE, Reason.INVALID_FIELD)
        if refused:
            self.registered.clear()
        if not known:
            level = logging.ERROR if refused else logging.WARNING
            logger.log(level, "Not registered with topology: %s", error.message)

    async def _watch(self) -> None:
        after_revision: int | None = None
        lost = False
        while True:
            request = pb.WatchTopologyRequest(after_revision=after_revision, without_links=True)
            try:
                async with aclosing(
                    self._remote.stream(self._stub.WatchTopology, request)
                ) as responses:
                    async for response in responses:
                        after_revision, lost = response.revision, False
                        self._take(event_from_proto(response, time.monotonic()))
            except ShardringError as error:
                if error.reason is Reason.REVISION_COMPACTED and after_revision is not None:
                    after_revision = None
                    continue  # from a snapshot, at once
                if not lost:
                    logger.info("Topology watch ended, will resume: %s", error.message)
                lost = True
            await asyncio.sleep(RECONNECT_SECONDS)

    def _note_claims(self, event: Topology | Change) -> None:
        """Say it when another machine reports this node's id; it is told with its refusal."""
        claims = {c.claimed_by for c in event.conflicts if c.node_id == self._identity.node_id}
        if self.registered.is_set() and claims - self._claims:
            logger.error(
                "Node id %s, which is this node's, is also reported by %s, and refused there. If "
                "one disk was cloned from the other, delete the file node-id from the data folder "
                "of one of them and restart it.",
                self._identity.node_id,
                ", ".join(sorted(claims - self._claims)),
            )
        self._claims = claims

    def _take(self, event: Topology | Change) -> None:
        self._note_claims(event)
        if not self._introduced:
            self._introduced = True
            self._links_changed.set()
        if self._peers.apply(event) and self._own is not None:
            self._prober.set_peers(self._own, list(self._peers.nodes.values()))
        if isinstance(event, Topology) and self._identity.node_id not in {
            node.node_id for node in event.nodes
        }:
            # The service started anew, or forgot us.
            self._report_now.set()


def _probing_facts(node: Node) -> tuple[object, ...]:
    """Return what of this node decides whom it probes, and how links are told."""
    return (node.endpoints, node.interfaces)
