"""A worker's downloads: begun, joined, watched on disk, stopped."""

import asyncio
import collections
import dataclasses
import logging
import time
from collections.abc import Callable

from services.common.errors import Reason, ShardringError
from services.downloads.domain.names import is_commit
from services.downloads.domain.records import Download, DownloadState, FileProgress, Layers
from services.downloads.worker.cache import Cache
from services.downloads.worker.fetch import FetchJob
from services.downloads.worker.fetcher import fetch
from services.downloads.worker.hub_threads import HubThreads
from services.downloads.worker.options import CacheOptions
from services.downloads.worker.plan import Plan, Planner
from services.downloads.worker.shelf import Shelf

logger = logging.getLogger(__name__)

# Speed is measured over this time.
_SPEED_SECONDS = 5.0
_PROGRESS_SECONDS = 0.5
# Ended downloads that are remembered; the oldest go first.
_MAX_ENDED = 200


class Transfers:
    """All downloads since the worker started. `on_change` hears of each change of one."""

    def __init__(
        self,
        node_id: str,
        options: CacheOptions,
        cache: Cache,
        shelf: Shelf,
        planner: Planner,
        hub_threads: HubThreads,
        on_change: Callable[[Download], None],
    ) -> None:
        self._node_id = node_id
        self._options = options
        self._cache = cache
        self._shelf = shelf
        self._planner = planner
        self._hub_threads = hub_threads
        self._on_change = on_change
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.downloads: dict[str, Download] = {}
        self.progress_seconds = _PROGRESS_SECONDS
        # Held while it is decided what to begin or remove.
        self._changing = asyncio.Lock()

    async def start(
        self, download_id: str, model_id: str, revision: str, layers: Layers | None
    ) -> Download:
        """Begin a download, or join one for the same model, commit and layers; return at once.

        One that completed is looked at again: what was removed since, or came with a moved
        branch, is fetched under the same id. A whole commit on disk stays COMPLETED.
        """
        async with self._changing:
            commit = await asyncio.to_thread(self._cache.resolve, model_id, revision)
            joined = self._same(model_id, revision, commit, layers)
            if joined is not None and (joined.live or await self._still_whole(joined, revision)):
                return self.downloads[joined.download_id]
            return self._begin(
                joined.download_id if joined else download_id, model_id, revision, layers
            )

    def _begin(
        self, download_id: str, model_id: str, revision: str, layers: Layers | None
    ) -> Download:
        now = time.time()
        download = Download(
            download_id=download_id,
            node_id=self._node_id,
            model_id=model_id,
            revision=revision,
            layers=layers,
            state=DownloadState.PENDING,
            create_time=now,
            update_time=now,
        )
        self._put(download)
        task = asyncio.create_task(self._run(download_id))
        self._tasks[download_id] = task
        task.add_done_callback(lambda _: self._tasks.pop(download_id, None))
        return download

    async def cancel(self, download_id: str) -> Download:
        """Stop a download and keep what it fetched; quiet when it already ended."""
        if (download := self.downloads.get(download_id)) is None:
            raise ShardringError(
                Reason.DOWNLOAD_NOT_FOUND,
                f"This node knows no download {download_id!r}.",
                metadata={"download_id": download_id},
            )
        if download.live and (task := self._tasks.get(download_id)):
            task.cancel()
            await asyncio.wait([task])
            if self.downloads[download_id].live:  # It had not even begun.
                self._update(download_id, state=DownloadState.CANCELLED)
        return self.downloads[download_id]

    async def delete(self, model_id: str) -> int:
        """Remove a model from disk; return the bytes freed.

        Raises MODEL_IN_USE while it is being downloaded, and MODEL_NOT_FOUND.
        """
        async with self._changing:
            live = [d for d in self.downloads.values() if d.live and d.model_id == model_id]
            if live:
                raise ShardringError(
                    Reason.MODEL_IN_USE,
                    f"{model_id} is being downloaded ({live[0].download_id}). Cancel that first.",
                    metadata={"model_id": model_id, "node_id": self._node_id},
                )
            return await asyncio.to_thread(self._shelf.remove, model_id)

    async def close(self) -> None:
        """Stop everything."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _same(
        self, model_id: str, revision: str, commit: str | None, layers: Layers | None
    ) -> Download | None:
        for download in self.downloads.values():
            if (
                (download.live or download.state is DownloadState.COMPLETED)
                and (download.model_id, download.layers) == (model_id, layers)
                and (download.revision == revision or download.commit in (revision, commit))
            ):
                return download
        return None

    async def _still_whole(self, download: Download, revision: str) -> bool:
        """True when a completed download of a commit, which cannot move, is all on disk."""
        if not is_commit(revision):
            return False
        plan = await asyncio.to_thread(
            self._planner.local, download.model_id, revision, download.layers
        )
        return plan is not None and await asyncio.to_thread(self._planner.complete, plan)

    async def _run(self, download_id: str) -> None:
        try:
            await self._fetch(download_id)
        except asyncio.CancelledError:
            self._update(download_id, state=DownloadState.CANCELLED, bytes_per_second=0)
        except ShardringError as error:
            self._fail(download_id, error)
        except Exception as error:
            logger.exception("Download %s met an unforeseen error", download_id)
            self._fail(
                download_id,
                ShardringError(Reason.DOWNLOAD_FAILED, f"Fetching failed: {error!r}"),
            )

    async def _fetch(self, download_id: str) -> None:
        wanted = self.downloads[download_id]
        plan = await self._hub_threads.run(
            self._planner.plan, wanted.model_id, wanted.revision, wanted.layers
        )
        progress = await asyncio.to_thread(self._progress, plan)
        self._update(download_id, commit=plan.known.commit, **_totals(progress))
        if not await asyncio.to_thread(self._planner.complete, plan):
            missing = sum(file.total_bytes - file.downloaded_bytes for file in progress)
            await asyncio.to_thread(self._check_space, plan, missing)
            self._update(download_id, state=DownloadState.ONGOING)
            await self._follow(download_id, plan, asyncio.create_task(fetch(self._job(plan))))
            progress = await asyncio.to_thread(self._progress, plan)
        if not await asyncio.to_thread(self._planner.complete, plan):
            raise ShardringError(
                Reason.DOWNLOAD_FAILED,
                "Files vanished while they were fetched. Start the download again.",
            )
        self._update(
            download_id,
            state=DownloadState.COMPLETED,
            bytes_per_second=0,
            snapshot_path=str(self._cache.snapshot(plan.model_id, plan.known.commit)),
            **_totals(progress),
        )

    async def _follow(self, download_id: str, plan: Plan, fetching: asyncio.Task[None]) -> None:
        """Report what is on disk until the child is done; raise what it met."""
        seen: collections.deque[tuple[float, int]] = collections.deque()
        try:
            while not fetching.done():
                progress = await asyncio.to_thread(self._progress, plan, live=True)
                now, done = time.monotonic(), sum(file.downloaded_bytes for file in progress)
                seen.append((now, done))
                while now - seen[0][0] > _SPEED_SECONDS:
                    seen.popleft()
                elapsed = now - seen[0][0]
                speed = max(0, round((done - seen[0][1]) / elapsed)) if elapsed else 0
                self._update(download_id, bytes_per_second=speed, **_totals(progress))
                await asyncio.wait([fetching], timeout=self.progress_seconds)
            await fetching
        finally:
            fetching.cancel()
            await asyncio.wait([fetching])
            progress = await asyncio.to_thread(self._progress, plan)
            self._update(download_id, **_totals(progress))

    def _progress(self, plan: Plan, *, live: bool = False) -> tuple[FileProgress, ...]:
        return self._shelf.progress(plan.model_id, plan.known, plan.files, live=live)

    def _check_space(self, plan: Plan, missing: int) -> None:
        available = self._cache.available_bytes()
        if missing > available:
            raise ShardringError(
                Reason.DISK_FULL,
                f"{plan.model_id} needs {missing} more bytes on the disk of this node, which has "
                f"{available}. Remove a model (shardring rm) or choose another node.",
                metadata={
                    "node_id": self._node_id,
                    "needed_bytes": missing,
                    "available_bytes": available,
                },
            )

    def _job(self, plan: Plan) -> FetchJob:
        return FetchJob(
            model_id=plan.model_id,
            commit=plan.known.commit,
            endpoint=self._options.endpoint,
            token=self._options.token,
            cache_dir=str(self._cache.folder),
            storage=str(self._cache.storage(plan.model_id)),
            parallel_files=self._options.parallel_files,
            files={file.name: file.size_bytes for file in plan.files},
        )

    def _fail(self, download_id: str, error: ShardringError) -> None:
        logger.warning("Download %s failed: %s", download_id, error.message)
        error.metadata.setdefault("download_id", download_id)
        error.metadata.setdefault("node_id", self._node_id)
        self._update(download_id, state=DownloadState.FAILED, error=error, bytes_per_second=0)

    def _update(self, download_id: str, **changes: object) -> None:
        before = self.downloads[download_id]
        after = dataclasses.replace(before, **changes)  # type: ignore[arg-type]
        if after != before:
            self._put(dataclasses.replace(after, update_time=time.time()))

    def _put(self, download: Download) -> None:
        self.downloads.pop(download.download_id, None)
        self.downloads[download.download_id] = download
        if not download.live and len(self.downloads) > _MAX_ENDED:
            ended = [entry for entry in self.downloads.values() if not entry.live]
            for old in ended[: max(0, len(ended) - _MAX_ENDED)]:
                del self.downloads[old.download_id]
        self._on_change(download)


def _totals(progress: tuple[FileProgress, ...]) -> dict[str, object]:
    return {
        "files": progress,
        "downloaded_bytes": sum(file.downloaded_bytes for file in progress),
        "total_bytes": sum(file.total_bytes for file in progress),
    }
