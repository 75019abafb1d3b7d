"""The service's soft state: attached workers, and what they report."""

import asyncio
import dataclasses
import logging
import time
from collections.abc import AsyncGenerator, Collection, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from services.common.errors import Reason, ShardringError
from services.downloads.domain.pace import MIN_REPORT_SECONDS, report_seconds
from services.downloads.domain.records import (
    CachedModel,
    Download,
    DownloadState,
    Layers,
    ModelFacts,
    NodeDisk,
    Verification,
)
from services.downloads.domain.stock import Stock
from services.downloads.watchers import Watchers

logger = logging.getLogger(__name__)

# A worker that is away longer is taken for dead, and so are its unfinished downloads.
AWAY_SECONDS = 30.0
# Ended downloads that are remembered; the oldest go first.
MAX_ENDED = 1000


class Worker(Protocol):
    """A node's worker, as the service commands it. Every call ends within a few seconds, and
    raises what the worker refused with, WORKER_NOT_ATTACHED or SERVICE_TIMEOUT."""

    async def start_download(
        self,
        download_id: str,
        model_id: str,
        revision: str,
        layers: Layers | None,
        instance_id: str,
    ) -> Download:
        """Begin a download under this id, or join one; return the one begun or joined. It goes on
        for as long as this instance (empty: a person) wants it, or another that joined it."""

    async def cancel_download(self, download_id: str, instance_id: str) -> Download:
        """Stop a download, with an instance only when nobody else wants it; quiet when it already
        ended."""

    async def delete_model(self, model_id: str) -> int:
        """Remove all revisions of a model and return the bytes freed."""

    async def read_model(self, model_id: str, revision: str) -> ModelFacts:
        """Read a model's facts from the worker's disk or the hub."""

    def pace(self, report_seconds: float) -> None:
        """Have it report about one download no more often than this."""

    def verify_model(self, model_id: str) -> AsyncGenerator[Verification, None]:
        """Compare a model's files with their hashes: yield how far that is, at the end what was
        found. It lasts as long as the disk takes; closing the generator stops it."""


@dataclass
class AttachedNode:
    """An attached worker and what lies in its cache folder."""

    worker: Worker
    cached: dict[tuple[str, str], CachedModel] = field(default_factory=dict)
    disk_available_bytes: int = 0
    # What an earlier worker of the node left unfinished and a person wants: to be begun again.
    interrupted: list[Download] = field(default_factory=list)


class Fleet:
    """All workers and downloads.

    A node that detaches takes its cached models with it at once: nobody can say what its disk
    holds. Its unfinished downloads stay as last reported, with speed 0, for `away_seconds`; then
    they are FAILED. When it attaches again its own list decides: a download it still works on
    goes on, even one that was given up. An unfinished one that it does not list is FAILED, unless
    a person wants it: then it is PENDING, to be begun again.
    """

    def __init__(self, watchers: Watchers, *, away_seconds: float = AWAY_SECONDS) -> None:
        self.nodes: dict[str, AttachedNode] = {}
        self.downloads: dict[str, Download] = {}
        # Downloads that a person asked for, rather than an instance, which ends with its node.
        self.wanted: set[str] = set()
        # Wanted ones whose node stayed away too long.
        self._given_up: set[str] = set()
        # Least time between two reports about one download, as all workers are told.
        self.report_seconds = MIN_REPORT_SECONDS
        # What attached nodes have on disk, and all live downloads.
        self.stock = Stock()
        # Where each attached node serves its files; 0: nowhere.
        self.hub_ports: dict[str, int] = {}
        self._watchers = watchers
        self._away_seconds = away_seconds
        self._away: dict[str, asyncio.TimerHandle] = {}

    def attach(
        self,
        node_id: str,
        worker: Worker,
        cached: Iterable[CachedModel],
        downloads: Iterable[Download],
        *,
        hub_port: int = 0,
    ) -> Worker | None:
        """Take a node in, and return the worker it replaces, if one was attached."""
        replaced = self.nodes.get(node_id)
        if timer := self._away.pop(node_id, None):
            timer.cancel()
        if replaced is not None:
            self._forget_disk(node_id, replaced)
        self.nodes[node_id] = AttachedNode(worker)
        self.hub_ports[node_id] = hub_port
        for model in cached:
            self.put_cached(node_id, model)
        listed = {download.download_id: download for download in downloads}
        interrupted = self._interrupted(node_id, listed)
        self.nodes[node_id].interrupted = interrupted
        kept = listed.keys() | {download.download_id for download in interrupted}
        self._give_up(node_id, kept, "The node's downloads worker was restarted.")
        for download in listed.values():
            self.put(download)
        logger.info("Node %s attached with %d models", node_id, len(self.nodes[node_id].cached))
        return None if replaced is None else replaced.worker

    def detach(self, node_id: str, worker: Worker) -> None:
        """Let a node go, unless another worker has taken its place."""
        node = self.nodes.get(node_id)
        if node is None or node.worker is not worker:
            return
        del self.nodes[node_id], self.hub_ports[node_id]
        self._forget_disk(node_id, node)
        for download in self.of(node_id=node_id):
            if download.live and download.bytes_per_second:
                self.put(download.at_rest())
        self._away[node_id] = asyncio.get_running_loop().call_later(
            self._away_seconds, self._stayed_away, node_id
        )
        logger.info("Node %s detached", node_id)

    def put_cached(self, node_id: str, model: CachedModel) -> None:
        """Note how a model on a node's disk now is; facts that are not sent stay known."""
        if (node := self.nodes.get(node_id)) is None:
            return
        key = (model.model_id, model.commit)
        known = node.cached.get(key)
        if model.facts is None and known is not None and known.facts is not None:
            model = dataclasses.replace(model, facts=known.facts)
        node.cached[key] = model
        self.stock.put_cached(node_id, model)

    def put_disk(self, node_id: str, available_bytes: int) -> None:
        """Note how much room a node's disk has."""
        if node := self.nodes.get(node_id):
            node.disk_available_bytes = available_bytes

    def disks(self) -> list[NodeDisk]:
        """Return the room on every attached node's disk, in node id order."""
        return [
            NodeDisk(node_id, node.disk_available_bytes)
            for node_id, node in sorted(self.nodes.items())
        ]

    def drop_cached(self, node_id: str, model_id: str) -> None:
        """Note that a model is gone from a node's disk."""
        if node := self.nodes.get(node_id):
            for key in [key for key in node.cached if key[0] == model_id]:
                self.stock.drop_cached(node_id, node.cached.pop(key))

    def put(self, download: Download) -> None:
        """Note how a download now is, and tell watchers."""
        before = self.downloads.pop(download.download_id, None)
        self.downloads[download.download_id] = download
        if before is not None and before.live and download.live:
            self.stock.replace_live(before, download)
        elif before is not None and before.live:
            self.stock.drop_live(before)
            self._set_pace()
        elif download.live:
            self.stock.put_live(download)
            self._set_pace()
        if not download.live and len(self.downloads) > MAX_ENDED:
            ended = [entry for entry in self.downloads.values() if not entry.live]
            for old in ended[: max(0, len(ended) - MAX_ENDED)]:
                del self.downloads[old.download_id]
                self.wanted.discard(old.download_id)
                self._given_up.discard(old.download_id)
        self._watchers.publish([download.download_id])

    def of(self, *, node_id: str = "", model_id: str = "") -> list[Download]:
        """Return the downloads of a node, of a model, or of both."""
        return [
            download
            for download in self.downloads.values()
            if node_id in ("", download.node_id) and model_id in ("", download.model_id)
        ]

    def worker(self, node_id: str) -> Worker:
        """Return a node's worker, or raise WORKER_NOT_ATTACHED."""
        if (node := self.nodes.get(node_id)) is None:
            raise ShardringError(
                Reason.WORKER_NOT_ATTACHED,
                f"The downloads worker of node {node_id!r} is not attached. Is its node running, "
                "and does it know this service's address?",
                metadata={"node_id": node_id},
                retry_delay_seconds=1,
            )
        return node.worker

    def close(self) -> None:
        """Stop the timers."""
        for timer in self._away.values():
            timer.cancel()
        self._away.clear()

    def _forget_disk(self, node_id: str, node: AttachedNode) -> None:
        for model in node.cached.values():
            self.stock.drop_cached(node_id, model)

    def _set_pace(self) -> None:
        """Tell all workers how often to report, when that changed notably."""
        seconds = report_seconds(self.stock.live_count, self.report_seconds)
        if seconds == self.report_seconds:
            return
        self.report_seconds = seconds
        for node in self.nodes.values():
            node.worker.pace(seconds)

    def _stayed_away(self, node_id: str) -> None:
        del self._away[node_id]
        live = {d.download_id for d in self.of(node_id=node_id) if d.live}
        self._given_up |= live & self.wanted
        self._give_up(node_id, (), f"The node has been away for {self._away_seconds:.0f} s.")

    def _interrupted(self, node_id: str, listed: Collection[str]) -> list[Download]:
        """Return what a node that attaches has to begin again, PENDING from now on."""
        found = []
        for download in self.of(node_id=node_id):
            name = download.download_id
            unfinished = download.live or name in self._given_up
            if name in self.wanted and unfinished and name not in listed:
                again = dataclasses.replace(
                    download.at_rest(),
                    state=DownloadState.PENDING,
                    error=None,
                    update_time=time.time(),
                )
                self.put(again)
                found.append(again)
            self._given_up.discard(name)
        return found

    def _give_up(self, node_id: str, except_for: Collection[str], why: str) -> None:
        for download in self.of(node_id=node_id):
            if not download.live or download.download_id in except_for:
                continue
            self.fail(
                download,
                ShardringError(
                    Reason.DOWNLOAD_FAILED,
                    f"{why} What was fetched is on its disk: start the download again to go on.",
                    metadata={"download_id": download.download_id, "node_id": node_id},
                ),
            )

    def fail(self, download: Download, error: ShardringError) -> None:
        """Note that a download came to nothing."""
        self.put(
            dataclasses.replace(
                download,
                state=DownloadState.FAILED,
                error=error,
                bytes_per_second=0,
                update_time=time.time(),
            )
        )
