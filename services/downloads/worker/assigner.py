"""Asks the downloads service where to take files from."""

import asyncio
import logging
from collections.abc import Sequence

from services.common.channel import Remote
from services.common.errors import ShardringError
from services.downloads.worker.schedule import Assignment, Holder
from shardring.downloads.v1.downloads_service_pb2 import AssignSourcesRequest
from shardring.downloads.v1.downloads_service_pb2_grpc import DownloadsServiceStub

logger = logging.getLogger(__name__)

_SECONDS = 3.0
_RELEASE_SECONDS = 1.0


class Assigner:
    """The calls that one node's worker makes."""

    def __init__(self, node_id: str, downloads: Remote) -> None:
        self._node_id = node_id
        self._remote = downloads
        self._stub = DownloadsServiceStub(downloads.channel)
        self._reached = True
        self._releasing: set[asyncio.Task[None]] = set()

    async def assign(
        self, model_id: str, commit: str, names: Sequence[str], most: int, excluded: Sequence[str]
    ) -> Assignment | None:
        """Ask for sources of `most` of these files; None when the service cannot say."""
        request = AssignSourcesRequest(
            node_id=self._node_id,
            model_id=model_id,
            commit=commit,
            file_names=names,
            max_count=most,
            excluded_node_ids=excluded,
        )
        try:
            response = await self._remote.unary(self._stub.AssignSources, request, timeout=_SECONDS)
        except ShardringError as error:
            if self._reached:
                logger.warning("Nobody says where files are (%s); the hub is asked", error.message)
            self._reached = False
            return None
        self._reached = True
        retry = response.retry_delay.ToTimedelta().total_seconds()
        return Assignment(
            {
                source.file_name: tuple(Holder(node.node_id, node.port) for node in source.nodes)
                for source in response.sources
            },
            retry if response.HasField("retry_delay") else None,
        )

    def release(self, model_id: str, commit: str, names: Sequence[str]) -> None:
        """Leave files to other nodes that this one was to fetch from the hub; waits for nobody."""
        request = AssignSourcesRequest(
            node_id=self._node_id, model_id=model_id, commit=commit, released_file_names=names
        )
        task = asyncio.create_task(self._release(request))
        self._releasing.add(task)
        task.add_done_callback(self._releasing.discard)

    async def close(self) -> None:
        """Let what is being released be released, for a second at most."""
        if self._releasing:
            await asyncio.wait(self._releasing)

    async def _release(self, request: AssignSourcesRequest) -> None:
        try:
            await self._remote.unary(self._stub.AssignSources, request, timeout=_RELEASE_SECONDS)
        except ShardringError as error:
            # The service forgets by itself, only later.
            logger.debug("Files could not be released: %s", error.message)
