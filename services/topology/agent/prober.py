"""Asks other nodes who they are, at each of their addresses, and measures the ways there."""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from services.common.channel import Remote
from services.common.errors import Reason, ShardringError
from services.topology.agent.bursts import RETRY_SECONDS, BurstGate, measure
from services.topology.agent.identify import identify
from services.topology.agent.probing import (
    Answered,
    AnsweredByOther,
    Outcome,
    Probed,
    Silent,
    Target,
    after,
    after_burst,
    links_of,
    misdirections_of,
    next_burst,
    retargeted,
)
from services.topology.agent.routes import own_address_towards
from services.topology.domain.addresses import IpNetwork
from services.topology.domain.model import Link, Misdirection, Node

logger = logging.getLogger(__name__)

MAX_CONCURRENT = 16
PROBE_TIMEOUT_SECONDS = 1.0
# Well within the time for which a throughput counts as current.
REMEASURE_SECONDS = 600.0
# After a burst that failed.
FAILED_BURST_SECONDS = 30.0
# How many times as long as it took a machine rests after a burst it asked for: before the first
# one on a link, and before others, so that measuring takes a twentieth of the time at most.
REST_FIRST, REST = 4, 19


class Prober:
    """Probes every address of every peer (in `networks`, if any), and knows which links are
    verified.

    `on_change` is called when a link or misdirection appears, goes or changes what it is;
    `on_figures` when a throughput was measured. `gate` is shared with the node's own server.
    """

    def __init__(
        self,
        node_id: str,
        *,
        lab: bool,
        networks: Collection[IpNetwork] = (),
        gate: BurstGate,
        on_change: Callable[[], None],
        on_figures: Callable[[], None],
    ) -> None:
        self._node_id = node_id
        self._lab = lab
        self._networks = networks
        self._gate = gate
        self._on_change = on_change
        self._on_figures = on_figures
        self._own: Node | None = None
        self._table: dict[Target, Probed] = {}
        # Kept while a target answers: a connection proves the address it was made to.
        self._remotes: dict[Target, Remote] = {}
        self._probing: set[Target] = set()
        self._slots = asyncio.Semaphore(MAX_CONCURRENT)
        self._wake = asyncio.Event()
        self._verified = asyncio.Event()

    def links(self) -> tuple[Link, ...]:
        """Return the links verified now."""
        return links_of(self._node_id, self._table, time.monotonic())

    def misdirections(self) -> tuple[Misdirection, ...]:
        """Return the addresses where another node than expected answered last."""
        return misdirections_of(self._node_id, self._table)

    @property
    def has_asked_all(self) -> bool:
        """True when every address of every peer has been asked."""
        return all(probed.asked for probed in self._table.values())

    def set_peers(self, own: Node, peers: Sequence[Node]) -> None:
        """Probe these peers from now on; new ones at once."""
        before = self._seen()
        self._own = own
        self._table = retargeted(
            self._table, own, peers, time.monotonic(), lab=self._lab, networks=self._networks
        )
        self._wake.set()
        if self._seen() != before:
            self._on_change()

    async def run(self, interval: Callable[[], float]) -> None:
        """Probe until cancelled; addresses again after some times `interval()` seconds."""
        try:
            async with asyncio.TaskGroup() as probes:
                while True:
                    self._wake.clear()
                    await self._close_unused()
                    idle = self._table.keys() - self._probing
                    now = time.monotonic()
                    for target in idle:
                        if self._table[target].due <= now:
                            self._probing.add(target)
                            probes.create_task(self._probe_one(target, interval))
                    idle -= self._probing
                    next_due = min((self._table[target].due for target in idle), default=None)
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(None if next_due is None else next_due - now):
                            await self._wake.wait()
        finally:
            await asyncio.gather(*(remote.close() for remote in self._remotes.values()))
            self._remotes.clear()

    async def run_bursts(self) -> None:
        """Measure the throughput of verified links, one after the other, until cancelled."""
        while True:
            self._verified.clear()
            target, due = next_burst(self._table)
            pause = None if target is None else due - time.monotonic()
            if target is None or (pause is not None and pause > 0):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._verified.wait()
            elif self._gate.busy_with():
                await asyncio.sleep(_jittered(RETRY_SECONDS, 0.75))
            else:
                first = self._table[target].measured is None
                took = await self._burst(target)
                await asyncio.sleep(took * (REST_FIRST if first else REST))

    async def _burst(self, target: Target) -> float:
        """Measure one link; return how many seconds that took, 0 when it came to nothing."""
        began = time.monotonic()
        start_ns = self._table[target].start_ns
        rate, wait_seconds = 0, _jittered(REMEASURE_SECONDS)
        try:
            rate = await measure(target.node_id, target.address, self._gate)
        except ShardringError as error:
            busy = error.reason is Reason.MEASUREMENT_BUSY
            wait_seconds = (
                _jittered(RETRY_SECONDS, 0.75) if busy else _jittered(FAILED_BURST_SECONDS)
            )
            logger.debug("Not measured, %s at %s: %s", target.node_id, target.address, error)
        now = time.monotonic()
        known = self._table.get(target)
        if known is None or known.start_ns != start_ns or not known.verified:
            return 0.0  # of a link that went meanwhile, a figure says nothing
        if not rate:
            self._table[target] = replace(known, burst_due=now + wait_seconds)
            return 0.0
        self._table[target] = after_burst(known, rate, now, wait_seconds=wait_seconds)
        self._on_figures()
        return now - began

    async def _close_unused(self) -> None:
        for target in self._remotes.keys() - self._table.keys():
            remote = self._remotes.pop(target, None)  # or a probe has just taken it up again
            if remote is not None:
                await remote.close()

    async def _probe_one(self, target: Target, interval: Callable[[], float]) -> None:
        try:
            async with self._slots:
                asked = self._table.get(target)
                if asked is None:
                    return  # the peer left while the probe waited its turn
                outcome = await self._probe(target)
            known = self._table.get(target)
            # Of a peer that left or started anew meanwhile, the answer says nothing.
            if known is not None and known.start_ns == asked.start_ns:
                self._note(target, known, outcome, interval())
        finally:
            self._probing.discard(target)
            self._wake.set()

    async def _probe(self, target: Target) -> Outcome:
        remote = self._remotes.pop(target, None)
        try:
            if remote is None:
                remote = Remote(f"node {target.node_id}", [target.address], node_id=target.node_id)
                # The first answer takes a connection; the next one is the round trip.
                await identify(remote, timeout=PROBE_TIMEOUT_SECONDS)
            started = time.perf_counter_ns()
            answered = await identify(remote, timeout=PROBE_TIMEOUT_SECONDS)
            round_trip_ns = time.perf_counter_ns() - started
            if answered == target.node_id:
                self._remotes[target], remote = remote, None
                return Answered(round_trip_ns, self._interface_towards(target))
            return AnsweredByOther(answered or "")
        except ShardringError as error:
            if error.reason is Reason.WRONG_NODE:
                return AnsweredByOther(error.metadata["node_id"])  # proven in the handshake
            return Silent(error.message)
        finally:
            if remote is not None:
                await remote.close()

    def _interface_towards(self, target: Target) -> str:
        interface = self._own and self._own.interface_at(own_address_towards(target.address))
        return interface.name if interface else ""

    def _note(self, target: Target, before: Probed, outcome: Outcome, interval: float) -> None:
        self._table[target] = known = after(before, outcome, time.monotonic(), interval)
        if isinstance(outcome, AnsweredByOther) and known.other != before.other:
            logger.warning(
                "At %s node %s answers, not node %s: no link",
                target.address,
                outcome.node_id or "(no proof of who)",
                target.node_id,
            )
        if not before.asked and self.has_asked_all:
            self._on_change()
        if known.other != before.other or known.source_interface != before.source_interface:
            self._on_change()
        if known.burst_due != before.burst_due:
            self._verified.set()
        if known.verified == before.verified:
            return
        if known.verified:
            self._verified.set()
            logger.info("Linked to node %s at %s", target.node_id, target.address)
        elif isinstance(outcome, Silent):
            logger.warning("Lost node %s at %s: %s", target.node_id, target.address, outcome.why)
        self._on_change()

    def _seen(self) -> object:
        links = [(link.key, link.kind, link.sink_port) for link in self.links()]
        return links, self.misdirections()


def _jittered(seconds: float, by: float = 0.1) -> float:
    """Return a time near this one, so that nodes that collided do so no more."""
    return seconds * random.uniform(1 - by, 1 + by)
