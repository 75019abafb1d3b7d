"""A worker's downloads: begun, joined, wanted by somebody, stopped."""

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from services.common.errors import Reason, ShardringError
from services.downloads.domain.names import is_commit
from services.downloads.domain.records import Download, DownloadState, Layers
from services.downloads.worker.assigner import Assigner
from services.downloads.worker.cache import Cache
from services.downloads.worker.errand import Errand, Node
from services.downloads.worker.hub_threads import HubThreads
from services.downloads.worker.options import CacheOptions
from services.downloads.worker.plan import Planner
from services.downloads.worker.shelf import Shelf
from services.downloads.worker.ways import Ways

logger = logging.getLogger(__name__)

# Ended downloads that are remembered; the oldest go first.
_MAX_ENDED = 200

# Models that instances on this node run, each with one of them.
InUse = Callable[[], Mapping[str, str]]


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
        assigner: Assigner,
        ways: Ways,
        on_change: Callable[[Download], None],
        in_use: InUse,
    ) -> None:
        self._in_use = in_use
        self._node = Node(node_id, options, cache, shelf, planner, hub_threads, assigner, ways)
        self._on_change = on_change
        self._tasks: dict[str, asyncio.Task[None]] = {}
        # Who wants each live download: instances, and "" for people.
        self._wanters: dict[str, set[str]] = {}
        # Held while it is decided what to begin or remove.
        self._changing = asyncio.Lock()

    @property
    def downloads(self) -> dict[str, Download]:
        """All that are remembered, by id."""
        return self._node.downloads

    def look_every(self, seconds: float) -> None:
        """Look at how far downloads are, and report it, no more often than this."""
        self._node.progress_seconds = seconds

    async def start(
        self,
        download_id: str,
        model_id: str,
        revision: str,
        layers: Layers | None,
        instance_id: str = "",
    ) -> Download:
        """Begin a download, or join one for the same model, commit and layers; return at once.

        One that completed is looked at again: what was removed since, or came with a moved
        branch, is fetched under the same id. A whole commit on disk stays COMPLETED. Who wants it
        is remembered until they withdraw that, or it ends.
        """
        async with self._changing:
            commit = await asyncio.to_thread(self._node.cache.resolve, model_id, revision)
            joined = self._same(model_id, revision, commit, layers)
            if joined is not None:
                download_id = joined.download_id
                if joined.live or await self._still_whole(joined, revision):
                    if joined.live:
                        self._wanters[download_id].add(instance_id)
                    return self.downloads[download_id]
            self._wanters[download_id] = {instance_id}
            return self._begin(download_id, model_id, revision, layers)

    def _begin(
        self, download_id: str, model_id: str, revision: str, layers: Layers | None
    ) -> Download:
        now = time.time()
        download = Download(
            download_id=download_id,
            node_id=self._node.node_id,
            model_id=model_id,
            revision=revision,
            layers=layers,
            state=DownloadState.PENDING,
            create_time=now,
            update_time=now,
        )
        self._put(download)
        task = asyncio.create_task(self._run(download))
        self._tasks[download_id] = task
        task.add_done_callback(lambda task: self._ended(download_id, task))
        return download

    async def cancel(self, download_id: str, instance_id: str = "") -> Download:
        """Stop a download and keep what it fetched; quiet when it already ended.

        With an instance only that one's wish is withdrawn; it goes on while anybody else wants it.
        """
        if (download := self.downloads.get(download_id)) is None:
            raise ShardringError(
                Reason.DOWNLOAD_NOT_FOUND,
                f"This node knows no download {download_id!r}.",
                metadata={"download_id": download_id},
            )
        wanters = self._wanters.get(download_id, set())
        wanters.discard(instance_id)
        if instance_id and wanters:
            return download
        # From now on nobody joins it.
        wanters.clear()
        if download.live and (task := self._tasks.get(download_id)):
            task.cancel()
            await asyncio.wait([task])
            if self.downloads[download_id].live:  # It had not even begun.
                self._end(download_id, state=DownloadState.CANCELLED)
        return self.downloads[download_id]

    async def delete(self, model_id: str) -> int:
        """Remove a model from disk; return the bytes freed.

        Raises MODEL_IN_USE while it is being downloaded or run, and MODEL_NOT_FOUND.
        """
        async with self._changing:
            live = [d for d in self.downloads.values() if d.live and d.model_id == model_id]
            if live:
                raise ShardringError(
                    Reason.MODEL_IN_USE,
                    f"{model_id} is being downloaded ({live[0].download_id}). Cancel that first.",
                    metadata={"model_id": model_id, "node_id": self._node.node_id},
                )
            if (instance_id := self._in_use().get(model_id)) is not None:
                raise ShardringError(
                    Reason.MODEL_IN_USE,
                    f"Instance {instance_id} runs {model_id} on this node. Stop it first "
                    f"(shardring down {instance_id}).",
                    metadata={
                        "model_id": model_id,
                        "node_id": self._node.node_id,
                        "instance_id": instance_id,
                    },
                )
            return await asyncio.to_thread(self._node.shelf.remove, model_id)

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
            going_on = download.live and bool(self._wanters.get(download.download_id))
            if (
                (going_on or download.state is DownloadState.COMPLETED)
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
            self._node.planner.local, download.model_id, revision, download.layers
        )
        return plan is not None and await asyncio.to_thread(self._node.planner.complete, plan)

    async def _run(self, wanted: Download) -> None:
        download_id = wanted.download_id

        def update(changes: dict[str, Any]) -> None:
            self._update(download_id, **changes)

        try:
            await Errand(self._node, wanted, update).run()
        except asyncio.CancelledError:
            self._end(download_id, state=DownloadState.CANCELLED)
        except ShardringError as error:
            self._fail(download_id, error)
        except Exception as error:
            logger.exception("Download %s met an unforeseen error", download_id)
            self._fail(
                download_id,
                ShardringError(Reason.DOWNLOAD_FAILED, f"Fetching failed: {error!r}"),
            )

    def _ended(self, download_id: str, task: "asyncio.Task[None]") -> None:
        # Under the same id it may have begun anew.
        if self._tasks.get(download_id) is task:
            del self._tasks[download_id]
            del self._wanters[download_id]

    def _fail(self, download_id: str, error: ShardringError) -> None:
        logger.warning("Download %s failed: %s", download_id, error.message)
        error.metadata.setdefault("download_id", download_id)
        error.metadata.setdefault("node_id", self._node.node_id)
        self._end(download_id, state=DownloadState.FAILED, error=error)

    def _end(self, download_id: str, **changes: object) -> None:
        self._put(
            dataclasses.replace(
                self.downloads[download_id].at_rest(),
                update_time=time.time(),
                **changes,  # type: ignore[arg-type]
            )
        )

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
