"""Asks other nodes who they are, at each of their addresses."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence

from services.common.channel import Remote
from services.common.errors import ShardringError
from services.topology.agent.probing import (
    Answered,
    AnsweredByOther,
    Outcome,
    Probed,
    Silent,
    Target,
    after,
    links_of,
    retargeted,
)
from services.topology.agent.rpc import identify
from services.topology.domain.model import Link, Node

logger = logging.getLogger(__name__)

MAX_CONCURRENT = 16
PROBE_TIMEOUT_SECONDS = 1.0


class Prober:
    """Probes every address of every peer, and knows which links are verified.

    `on_change` is called when a link appears, goes or changes its kind.
    """

    def __init__(self, node_id: str, *, lab: bool, on_change: Callable[[], None]) -> None:
        self._node_id = node_id
        self._lab = lab
        self._on_change = on_change
        self._table: dict[Target, Probed] = {}
        # Kept while a target answers: a connection proves the address it was made to.
        self._remotes: dict[Target, Remote] = {}
        self._probing: set[Target] = set()
        self._slots = asyncio.Semaphore(MAX_CONCURRENT)
        self._wake = asyncio.Event()

    def links(self) -> tuple[Link, ...]:
        """Return the links verified now."""
        return links_of(self._node_id, self._table)

    def set_peers(self, own: Node, peers: Sequence[Node]) -> None:
        """Probe these peers from now on; new ones at once."""
        before = _keys(self.links())
        self._table = retargeted(self._table, own, peers, time.monotonic(), lab=self._lab)
        self._wake.set()
        if _keys(self.links()) != before:
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
                remote = Remote(f"node {target.node_id}", [target.address])
                # The first answer takes a connection; the next one is the round trip.
                await identify(remote, timeout=PROBE_TIMEOUT_SECONDS)
            started = time.perf_counter_ns()
            answered = await identify(remote, timeout=PROBE_TIMEOUT_SECONDS)
            round_trip_ns = time.perf_counter_ns() - started
            if answered == target.node_id:
                self._remotes[target], remote = remote, None
                return Answered(round_trip_ns)
            return AnsweredByOther(answered or "")
        except ShardringError as error:
            return Silent(error.message)
        finally:
            if remote is not None:
                await remote.close()

    def _note(self, target: Target, before: Probed, outcome: Outcome, interval: float) -> None:
        self._table[target] = known = after(before, outcome, time.monotonic(), interval)
        if isinstance(outcome, AnsweredByOther) and known.other != before.other:
            logger.warning(
                "At %s node %s answers, not node %s: no link",
                target.address,
                outcome.node_id or "(no proof of who)",
                target.node_id,
            )
        if known.verified == before.verified:
            return
        if known.verified:
            logger.info("Linked to node %s at %s", target.node_id, target.address)
        elif isinstance(outcome, Silent):
            logger.warning("Lost node %s at %s: %s", target.node_id, target.address, outcome.why)
        self._on_change()


def _keys(links: Sequence[Link]) -> list[tuple[object, ...]]:
    return [(link.key, link.kind) for link in links]
