"""Getting a shard's files onto this node's disk, through the downloads service."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
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
    """The downloads service, asked on behalf of one node."""

    def __init__(self, node_id: str, downloads: Remote) -> None:
        self._node_id = node_id
        self._remote = downloads
        self._stub = downloads_service_pb2_grpc.DownloadsServiceStub(downloads.channel)

    async def fetch(
        self,
        model_id: str,
        commit: str,
        layers: tuple[int, int],
        on_progress: Callable[[float], None],
    ) -> Path:
        """Return the folder with the files that layers [start, end) need, once they are complete.

        `on_progress` is given the fraction on disk, 0 to 1. Survives a restart of the service.
        Raises ShardringError with the download's own reason, or SERVICE_UNAVAILABLE when the
        service stays away.
        """
        loop = asyncio.get_running_loop()
        last_contact = loop.time()
        while True:
            try:
                started = await self._start(model_id, commit, layers)
                async for download in self._follow(started):
                    last_contact = loop.time()
                    if download.total_bytes:
                        on_progress(min(1.0, download.downloaded_bytes / download.total_bytes))
                    if download.state in _ENDED:
                        return _folder(download)
            except ShardringError as error:
                away = loop.time() - last_contact
                passing = error.reason in (
                    Reason.SERVICE_UNAVAILABLE,
                    Reason.SERVICE_TIMEOUT,
                    Reason.WORKER_NOT_ATTACHED,
                    Reason.DOWNLOAD_NOT_FOUND,
                )
                if not passing or away > _OUTAGE_SECONDS:
                    raise
                logger.debug("Downloads service: %s", error)
            await asyncio.sleep(_RETRY_SECONDS)

    async def _start(
        self, model_id: str, commit: str, layers: tuple[int, int]
    ) -> downloads_pb2.Download:
        request = downloads_service_pb2.StartDownloadRequest(
            node_id=self._node_id,
            model_id=model_id,
            revision=commit,
            layers=common_pb2.LayerRange(start=layers[0], end=layers[1]),
        )
        call = self._remote.unary(self._stub.StartDownload, request, timeout=_CALL_SECONDS)
        return (await call).download

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
