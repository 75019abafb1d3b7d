"""One download from its plan to its last file."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from services.common.errors import Reason, ShardringError
from services.common.security import current_security
from services.downloads.domain.records import Download, DownloadState, FileProgress
from services.downloads.worker.assigner import Assigner
from services.downloads.worker.cache import Cache
from services.downloads.worker.fetcher import Fetcher
from services.downloads.worker.gathering import Gathering
from services.downloads.worker.hub_threads import HubThreads
from services.downloads.worker.limits import SharedRate, Slots
from services.downloads.worker.meter import Meter, amounts
from services.downloads.worker.options import CacheOptions
from services.downloads.worker.plan import Plan, Planner
from services.downloads.worker.protocol import FetchJob
from services.downloads.worker.room import check_room, disk_full, spoken_for
from services.downloads.worker.schedule import Schedule
from services.downloads.worker.shelf import Shelf
from services.downloads.worker.ways import Ways


def tls_files() -> tuple[str, ...]:
    """Return the files by which this process proves who it is; none in the clear."""
    tls = current_security().tls
    return () if tls is None else (str(tls.cert), str(tls.key), str(tls.ca))


class Node:
    """What all downloads of a node share."""

    def __init__(
        self,
        node_id: str,
        options: CacheOptions,
        cache: Cache,
        shelf: Shelf,
        planner: Planner,
        hub_threads: HubThreads,
        assigner: Assigner,
        ways: Ways,
    ) -> None:
        self.node_id = node_id
        self.options = options
        self.cache = cache
        self.shelf = shelf
        self.planner = planner
        self.hub_threads = hub_threads
        self.assigner = assigner
        self.ways = ways
        self.slots = Slots(options.parallel_files)
        self.rate = SharedRate(options.bytes_per_second)
        # Least time between two looks at how far a download is.
        self.progress_seconds = 0.5
        self.downloads: dict[str, Download] = {}
        # Room on the disk when each download that is fetched was last looked at.
        self.rooms: dict[str, int] = {}


class Errand:
    """Carries out one download. `update` is given the fields of it that change."""

    def __init__(
        self, node: Node, wanted: Download, update: Callable[[dict[str, Any]], None]
    ) -> None:
        self._node = node
        self._wanted = wanted
        self._update = update
        self._fetcher = Fetcher(node.options.endpoint)

    async def run(self) -> None:
        """Bring all files to disk. Raises ShardringError; cancelling it keeps what was fetched."""
        try:
            await self._run()
        finally:
            await self._fetcher.close()

    async def _run(self) -> None:
        node, wanted = self._node, self._wanted
        what = (wanted.model_id, wanted.revision, wanted.layers)
        if not await asyncio.to_thread(node.planner.whole, *what) and not node.options.offline:
            # Loads what it needs while the plan is made.
            await self._fetcher.start()
        plan = await node.hub_threads.run(node.planner.plan, *what)
        room = await asyncio.to_thread(node.cache.available_bytes)
        before = await asyncio.to_thread(self._on_disk, plan)
        self._update({"commit": plan.known.commit, **amounts(before)})
        changes = amounts(before)
        if not await asyncio.to_thread(node.planner.complete, plan):
            self._check_room(plan, before, room)
            self._update({"state": DownloadState.ONGOING})
            changes = await self._fetch(plan, before)
            if not await asyncio.to_thread(node.planner.complete, plan):
                raise ShardringError(
                    Reason.DOWNLOAD_FAILED,
                    "Files vanished while they were fetched. Start the download again.",
                )
        snapshot = node.cache.snapshot(plan.model_id, plan.known.commit)
        self._update({**changes, "state": DownloadState.COMPLETED, "snapshot_path": str(snapshot)})

    async def _fetch(self, plan: Plan, before: tuple[FileProgress, ...]) -> dict[str, Any]:
        """Fetch what is missing; return how far it is then. That is told also when it fails."""
        node = self._node
        if not self._fetcher.started:
            await self._fetcher.start()
        etags = {name: file.etag for name, file in (plan.known.listing or {}).items()}
        meter = Meter(etags, before)
        missing = await asyncio.to_thread(node.planner.missing, plan)
        gathering = Gathering(
            plan,
            etags,
            Schedule(
                [file.name for file in missing],
                time.monotonic(),
                node.options.patience_seconds,
                # Nobody can say whether a neighbour has a file without bytes.
                hub_only=[file.name for file in missing if not file.size_bytes],
            ),
            meter,
            self._fetcher,
            node.assigner,
            node.ways,
            node.slots,
            node.rate,
        )
        self._fetcher.begin(self._job(plan))
        try:
            await self._follow(plan, meter, asyncio.create_task(gathering.run()))
        finally:
            node.rooms.pop(self._wanted.download_id, None)
            # Nothing is written any more when it is looked at for the last time.
            await self._fetcher.close()
            changes = meter.finish(await asyncio.to_thread(self._on_disk, plan))
            self._update(changes)
        return changes

    async def _follow(self, plan: Plan, meter: Meter, gathering: "asyncio.Task[None]") -> None:
        """Report what is on disk until everything is there; raise what came in between."""
        try:
            while True:
                await asyncio.wait([gathering], timeout=self._node.progress_seconds)
                if gathering.done():
                    break
                # In this order: what is written in between must not seem to lack room.
                room, written = await asyncio.to_thread(self._look, plan, meter.etags)
                self._update(meter.look(time.monotonic(), written))
                self._node.rooms[self._wanted.download_id] = room
                check_room(plan.model_id, self._node.node_id, meter.left_bytes, room)
            await gathering
        except ShardringError as error:
            if error.reason is not Reason.DISK_FULL or "needed_bytes" in error.metadata:
                raise
            # The child only knows that it could not write.
            room, written = await asyncio.to_thread(self._look, plan, meter.etags)
            self._update(meter.look(time.monotonic(), written))
            raise disk_full(plan.model_id, self._node.node_id, meter.left_bytes, room) from error
        finally:
            gathering.cancel()
            await asyncio.wait([gathering])
            if not gathering.cancelled():
                # Looked at here when something else came first.
                gathering.exception()

    def _look(self, plan: Plan, etags: set[str]) -> tuple[int, dict[str, int]]:
        cache = self._node.cache
        return cache.available_bytes(), cache.written_sizes(plan.model_id, etags)

    def _on_disk(self, plan: Plan) -> tuple[FileProgress, ...]:
        return self._node.shelf.progress(plan.model_id, plan.known, plan.files)

    def _check_room(self, plan: Plan, before: tuple[FileProgress, ...], room: int) -> None:
        node = self._node
        others = [
            download
            for download in node.downloads.values()
            if download.download_id != self._wanted.download_id
        ]
        missing = sum(file.total_bytes - file.downloaded_bytes for file in before)
        # What others wrote since they were looked at is in their figures still.
        room = max(room, *node.rooms.values(), 0)
        taken = spoken_for(others, plan.known.commit, before)
        check_room(plan.model_id, node.node_id, missing, room - taken)

    def _job(self, plan: Plan) -> FetchJob:
        node = self._node
        return FetchJob(
            model_id=plan.model_id,
            commit=plan.known.commit,
            endpoint=node.options.endpoint,
            token=node.options.token,
            cache_dir=str(node.cache.folder),
            storage=str(node.cache.storage(plan.model_id)),
            parallel_files=node.options.parallel_files,
            # What comes by way of Xet storage cannot be bounded.
            xet=not node.rate.bytes_per_second,
            tls=tls_files(),
        )
