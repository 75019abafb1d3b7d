"""Keeps a gateway's workers those of the cluster, and tells what changes."""

import asyncio
import contextlib
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from services.cli.census import take_census
from services.cli.client import Cluster
from services.cli.gateway.smg import Smg, SmgError
from services.cli.gateway.tunnels import Tunnels
from services.cli.gateway.workers import Worker, kept, workers_of
from services.common.addresses import HostPort
from services.common.errors import ShardringError
from services.common.security import current_security

_LOOK_SECONDS = 1.0
# While something has yet to be taken by smg.
_EAGER_SECONDS = 0.2
_CONNECT_SECONDS = 2.0
# A worker that smg has not taken after this long is told of.
_TAKING_SECONDS = 15.0


class Told(Protocol):
    """Hears of what happens to a gateway's workers."""

    def waiting(self) -> None:
        """There is no instance that can be served, now or for the first time."""

    def cluster_lost(self, why: str) -> None:
        """The cluster cannot be asked; the workers stay what they are."""

    def added(self, worker: Worker, address: HostPort) -> None:
        """An instance answers requests from now on."""

    def removed(self, worker: Worker) -> None:
        """An instance answers no more."""

    def late(self, worker: Worker, why: str) -> None:
        """An instance is READY, and yet does not answer."""


@dataclass
class _Entry:
    """A worker on its way into smg. `address` None: not reached yet; `local`: where smg finds it,
    the same or a way there with TLS."""

    worker: Worker
    since: float
    address: HostPort | None = None
    local: HostPort | None = None
    answers: bool = False
    told_late: bool = False


class Follower:
    """Makes the cluster's READY instances the workers of `smg`, for as long as `run` runs."""

    def __init__(self, cluster: Cluster, smg: Smg, models: Collection[str], told: Told) -> None:
        self._cluster = cluster
        self._smg = smg
        self._models = models
        self._told = told
        self._entries: dict[str, _Entry] = {}
        self._listed: dict[str, HostPort] = {}
        self._is_waiting = self._is_lost = False
        # Why smg did not say the last time what it serves.
        self._silence = ""
        tls = current_security().tls
        self._tunnels = None if tls is None else Tunnels(tls)

    async def run(self) -> None:
        """Follow the cluster for ever."""
        try:
            while True:
                await self._look()
                await self._reach()
                self._list()
                await self._confirm()
                self._tell()
                # Something is on its way, and not for so long that it may never come.
                eager = any(not e.answers and not e.told_late for e in self._entries.values())
                await asyncio.sleep(_EAGER_SECONDS if eager else _LOOK_SECONDS)
        finally:
            if self._tunnels is not None:
                await self._tunnels.close_all()

    async def _look(self) -> None:
        """Ask the cluster what there is."""
        try:
            census = await take_census(self._cluster)
        except ShardringError as error:
            if not self._is_lost:
                self._told.cluster_lost(error.message)
            self._is_lost = True
            return
        self._is_lost = False
        before = {key: entry.worker for key, entry in self._entries.items()}
        absent = census.unreachable_ids
        if census.gathering:
            # Nodes that it has not heard of yet have not gone.
            absent |= {w.head_node_id for w in before.values()} - census.node_ids
        now = kept(before, workers_of(census, self._models), absent)
        for key in before.keys() - now.keys():
            entry = self._entries.pop(key)
            if entry.answers:
                self._told.removed(entry.worker)
            if self._tunnels is not None:
                await self._tunnels.close(key)
        for key in now.keys() - before.keys():
            self._entries[key] = _Entry(now[key], time.monotonic())

    async def _reach(self) -> None:
        """Find out at which of its addresses each new head is reached from here."""
        news = [entry for entry in self._entries.values() if entry.address is None]
        addresses = await asyncio.gather(*(_reached(e.worker.addresses) for e in news))
        for entry, address in zip(news, addresses, strict=True):
            entry.address = entry.local = address
            if address is not None and self._tunnels is not None:
                worker = entry.worker
                entry.local = await self._tunnels.open(worker.key, worker.head_node_id, address)

    def _list(self) -> None:
        listed = {key: e.local for key, e in self._entries.items() if e.local is not None}
        if listed != self._listed:
            self._smg.set_workers(listed)
            self._listed = listed

    async def _confirm(self) -> None:
        """Tell which of the new ones smg has taken by now, their tokenizers included."""
        pending = {k: e for k, e in self._entries.items() if not e.answers and e.address}
        if not pending:
            return
        try:
            served = await self._smg.served()
        except SmgError as error:
            # Busy perhaps; told of when it lasts. Whether it lives on is for others to see.
            self._silence = f": {error.message}"
            return
        self._silence = ""
        for key, entry in pending.items():
            if key in served.ready_keys and entry.worker.model_id in served.tokenizers:
                assert entry.address is not None
                entry.answers = True
                self._told.added(entry.worker, entry.address)

    def _tell(self) -> None:
        if self._entries:
            self._is_waiting = False
        elif not self._is_lost and not self._is_waiting:
            self._told.waiting()
            self._is_waiting = True
        for entry in self._entries.values():
            is_late = time.monotonic() - entry.since > _TAKING_SECONDS
            if is_late and not entry.answers and not entry.told_late:
                entry.told_late = True
                where = " or ".join(map(str, entry.worker.addresses)) or "no address of its head"
                why = (
                    f"smg has not taken it yet{self._silence}"
                    if entry.address is not None
                    else f"nothing answers at {where}; is the port open to this machine?"
                )
                self._told.late(entry.worker, why.rstrip("."))


async def _reached(addresses: Collection[HostPort]) -> HostPort | None:
    """Return the first of the addresses that takes a connection."""
    for address in addresses:
        with contextlib.suppress(OSError):
            async with asyncio.timeout(_CONNECT_SECONDS):
                _, writer = await asyncio.open_connection(address.host, address.port)
            writer.close()
            return address
    return None
