"""Getting a shard's files onto this node's disk, through the downloads service."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from services.common.channel import Remote
from services.common.errors import Reason, ShardringError
from services.common.status import error_from_proto
from shardring.common.v1 import common_pb2
from shardring.downloads.v1 import downloads_pb2, downloads_service_pb2, downloads_service_pb2_grpc

logger = logging.getLogger(__name__)

_CALL_SECONDS = 10.0
_OUTAGE_SECONDS = 30.0
_RETRY_SECONDS = 1.0
_ENDED = (
    downloads_pb2.DOWNLOAD_STATE_COMPLETED,
    downloads_pb2.DOWNLOAD_STATE_FAILED,
    downloads_pb2.DOWNLOAD_STATE_CANCELLED,
)


class Files:
    """The downloads service, asked on behalf of one node's instances."""

    def __init__(self, node_id: str, downloads: Remote) -> None:
        self._node_id = node_id
        self._remote = downloads
        self._stub = downloads_service_pb2_grpc.DownloadsServiceStub(downloads.channel)
        # What an instance no longer wants, while the service is told so.
        self._withdrawals: dict[asyncio.Task[None], str] = {}

    async def fetch(
        self,
        instance_id: str,
        model_id: str,
        commit: str,
        layers: tuple[int, int],
        on_progress: Callable[[float], None],
    ) -> Path:
        """Return the folder with the files that layers [start, end) need, once they are complete.

        `on_progress` is given the fraction on disk, 0 to 1. Survives a restart of the service.
        Raises ShardringError with the download's own reason, or SERVICE_UNAVAILABLE when the
        service stays away. On every other way out than with the files, the instance's wish for
        them is withdrawn.
        """
        # An earlier start of the instance must not take back what this one wants.
        await self._withdrawn(instance_id)
        wish = _Wish(
            downloads_service_pb2.StartDownloadRequest(
                node_id=self._node_id,
                model_id=model_id,
                revision=commit,
                layers=common_pb2.LayerRange(start=layers[0], end=layers[1]),
                instance_id=instance_id,
            )
        )
        try:
            return await self._fetch(wish, on_progress)
        except BaseException:
            # In a task of its own: whoever gave up does not wait for it.
            task = asyncio.create_task(self._withdraw(wish))
            self._withdrawals[task] = instance_id
            task.add_done_callback(self._withdrawals.pop)
            raise

    async def close(self) -> None:
        """Stop withdrawing: this node's downloads end with it."""
        for task in self._withdrawals:
            task.cancel()
        await asyncio.gather(*self._withdrawals, return_exceptions=True)

    async def _fetch(self, wish: "_Wish", on_progress: Callable[[float], None]) -> Path:
        loop = asyncio.get_running_loop()
        last_contact = loop.time()
        while True:
            try:
                started = await self._start(wish)
                async for download in self._follow(started):
                    last_contact = loop.time()
                    if download.total_bytes:
                        on_progress(min(1.0, download.downloaded_bytes / download.total_bytes))
                    if download.state in _ENDED:
                        return _folder(download)
            except ShardringError as error:
                if not _is_passing(error) or loop.time() - last_contact > _OUTAGE_SECONDS:
                    raise
                logger.debug("Downloads service: %s", error)
            await asyncio.sleep(_RETRY_SECONDS)

    async def _start(self, wish: "_Wish") -> downloads_pb2.Download:
        # Goes on when this is cancelled: only its answer says which download to withdraw from.
        call = self._remote.unary(self._stub.StartDownload, wish.request, timeout=_CALL_SECONDS)
        wish.starting = asyncio.create_task(_download_of(call))
        wish.download = await asyncio.shield(wish.starting)
        return wish.download

    async def _withdrawn(self, instance_id: str) -> None:
        tasks = [task for task, owner in self._withdrawals.items() if owner == instance_id]
        if tasks:
            await asyncio.wait(tasks)

    async def _withdraw(self, wish: "_Wish") -> None:
        """Tell the service that the instance wants this no more, for as long as may help."""
        loop = asyncio.get_running_loop()
        until = loop.time() + _OUTAGE_SECONDS
        if wish.starting is not None:
            try:
                wish.download = await wish.starting
            except ShardringError as error:
                logger.debug("Nothing to withdraw from: %s", error)
        if wish.download is None or wish.download.state in _ENDED:
            return
        request = downloads_service_pb2.CancelDownloadRequest(
            download_id=wish.download.download_id, instance_id=wish.request.instance_id
        )
        while True:
            try:
                await self._remote.unary(self._stub.CancelDownload, request, timeout=_CALL_SECONDS)
                return
            except ShardringError as error:
                if not _is_passing(error) or loop.time() > until:
                    logger.warning("A download of %s goes on: %s", wish.request.model_id, error)
                    return
            await asyncio.sleep(_RETRY_SECONDS)

    async def _follow(
        self, download: downloads_pb2.Download
    ) -> AsyncIterator[downloads_pb2.Download]:
        yield download
        if download.state in _ENDED:
            return
        request = downloads_service_pb2.WatchDownloadsRequest(download_ids=[download.download_id])
        async for message in self._remote.stream(self._stub.WatchDownloads, request):
            for changed in message.downloads:
                yield changed


@dataclass
class _Wish:
    """What an instance asked for: its latest call, and the download that this gave."""

    request: downloads_service_pb2.StartDownloadRequest
    starting: "asyncio.Task[downloads_pb2.Download] | None" = None
    download: downloads_pb2.Download | None = None


async def _download_of(
    call: Awaitable[downloads_service_pb2.StartDownloadResponse],
) -> downloads_pb2.Download:
    return (await call).download


def _is_passing(error: ShardringError) -> bool:
    return error.reason in (
        Reason.SERVICE_UNAVAILABLE,
        Reason.SERVICE_TIMEOUT,
        Reason.WORKER_NOT_ATTACHED,
        Reason.DOWNLOAD_NOT_FOUND,
    )


def _folder(download: downloads_pb2.Download) -> Path:
    """Return the folder of a download that ended well. Raises its error otherwise."""
    if download.state == downloads_pb2.DOWNLOAD_STATE_COMPLETED:
        return Path(download.snapshot_path)
    if download.HasField("error"):
        raise error_from_proto(download.error)
    raise ShardringError(
        Reason.DOWNLOAD_FAILED,
        f"The download of {download.model_id} was cancelled.",
        metadata={"download_id": download.download_id, "node_id": download.node_id},
    )
