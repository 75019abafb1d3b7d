"""DownloadsService over gRPC: convert, call, convert."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc

from services.common.errors import Reason, ShardringError
from services.downloads.app import Downloads
from services.downloads.domain.reports import check_disk, check_hub_port, check_worker_id
from services.downloads.fleet import Fleet
from services.downloads.rpc.convert import (
    ask_from_proto,
    assigned_to_proto,
    disk_to_proto,
    download_to_proto,
    facts_to_proto,
    fraction_to_proto,
    layers_from_proto,
    on_nodes_to_proto,
    verification_to_proto,
)
from services.downloads.rpc.session import WorkerSession, checked_cached, checked_download
from shardring.downloads.v1 import downloads_service_pb2 as pb
from shardring.downloads.v1.downloads_service_pb2_grpc import DownloadsServiceServicer

Context = grpc.aio.ServicerContext[Any, Any]


class DownloadsServicer(DownloadsServiceServicer):
    """Delegates to `Downloads`; AttachWorker feeds the `Fleet`."""

    def __init__(self, downloads: Downloads, fleet: Fleet) -> None:
        self._downloads = downloads
        self._fleet = fleet
        self._sessions: set[WorkerSession] = set()

    async def StartDownload(
        self, request: pb.StartDownloadRequest, context: Context
    ) -> pb.StartDownloadResponse:
        """Have a node fetch a model."""
        layers = layers_from_proto(request.layers) if request.HasField("layers") else None
        download = await self._downloads.start(
            request.node_id, request.model_id, request.revision, layers, request.instance_id
        )
        return pb.StartDownloadResponse(download=download_to_proto(download))

    async def GetDownload(
        self, request: pb.GetDownloadRequest, context: Context
    ) -> pb.GetDownloadResponse:
        """Return one download."""
        download = self._downloads.get(request.download_id)
        return pb.GetDownloadResponse(download=download_to_proto(download))

    async def ListDownloads(
        self, request: pb.ListDownloadsRequest, context: Context
    ) -> pb.ListDownloadsResponse:
        """Return a page of downloads."""
        page, token = self._downloads.list_downloads(
            request.node_id, request.model_id, request.page_size, request.page_token
        )
        return pb.ListDownloadsResponse(
            downloads=map(download_to_proto, page), next_page_token=token
        )

    async def GetFractions(
        self, request: pb.GetFractionsRequest, context: Context
    ) -> pb.GetFractionsResponse:
        """Return how much of a model each node has."""
        fractions = self._downloads.fractions(request.model_id, request.node_ids, request.revision)
        return pb.GetFractionsResponse(fractions=map(fraction_to_proto, fractions))

    async def WatchDownloads(
        self, request: pb.WatchDownloadsRequest, context: Context
    ) -> AsyncIterator[pb.WatchDownloadsResponse]:
        """Send downloads as they are, then as they change."""
        async for downloads, revision in self._downloads.watch(request.download_ids):
            yield pb.WatchDownloadsResponse(
                downloads=map(download_to_proto, downloads), revision=revision
            )

    async def CancelDownload(
        self, request: pb.CancelDownloadRequest, context: Context
    ) -> pb.CancelDownloadResponse:
        """Stop a download."""
        download = await self._downloads.cancel(request.download_id, request.instance_id)
        return pb.CancelDownloadResponse(download=download_to_proto(download))

    async def DeleteModel(
        self, request: pb.DeleteModelRequest, context: Context
    ) -> pb.DeleteModelResponse:
        """Remove a model from a node's disk."""
        freed = await self._downloads.delete_model(request.node_id, request.model_id)
        return pb.DeleteModelResponse(freed_bytes=freed)

    async def VerifyModel(
        self, request: pb.VerifyModelRequest, context: Context
    ) -> AsyncIterator[pb.VerifyModelResponse]:
        """Compare a model's files on a node's disk with their hashes."""
        steps = self._downloads.verify_model(request.node_id, request.model_id)
        async with aclosing(steps):
            async for step in steps:
                yield pb.VerifyModelResponse(verification=verification_to_proto(step))

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:
        """Return a model's facts."""
        facts = await self._downloads.model(request.model_id, request.revision)
        return pb.GetModelResponse(model=facts_to_proto(facts))

    async def ListModels(
        self, request: pb.ListModelsRequest, context: Context
    ) -> pb.ListModelsResponse:
        """Return a page of the models on nodes' disks."""
        page, token = self._downloads.models(request.page_size, request.page_token)
        return pb.ListModelsResponse(
            models=map(on_nodes_to_proto, page),
            next_page_token=token,
            disks=map(disk_to_proto, self._downloads.disks()),
        )

    async def AssignSources(
        self, request: pb.AssignSourcesRequest, context: Context
    ) -> pb.AssignSourcesResponse:
        """Tell a worker where to take files from."""
        return assigned_to_proto(self._downloads.assign(ask_from_proto(request)))

    async def AttachWorker(
        self, requests: AsyncIterator[pb.AttachWorkerRequest], context: Context
    ) -> AsyncIterator[pb.AttachWorkerResponse]:
        """Hold a worker's stream: its reports up, commands down."""
        first = await anext(aiter(requests), None)
        hello = pb.WorkerHello() if first is None else first.hello
        check_worker_id(hello.node_id)
        check_hub_port(hello.hub_port)
        # All of it is looked at before any of it counts.
        cached = [checked_cached(model) for model in hello.cached_models]
        downloads = [checked_download(hello.node_id, one) for one in hello.downloads]
        check_disk(hello.disk_available_bytes)
        session = WorkerSession(hello.node_id, context.peer(), self._fleet.report_seconds)
        self._sessions.add(session)
        replaced = self._fleet.attach(
            session.node_id, session, cached, downloads, hub_port=hello.hub_port
        )
        self._fleet.put_disk(session.node_id, hello.disk_available_bytes)
        if isinstance(replaced, WorkerSession):
            replaced.end(_replaced_by(session, replaced))
        listening = asyncio.create_task(session.listen(requests, self._fleet))
        going_on = asyncio.create_task(self._downloads.go_on(session.node_id))
        try:
            async for command in session.commands():
                yield command
            await listening  # Raises what went wrong while listening.
        finally:
            self._sessions.discard(session)
            self._fleet.detach(session.node_id, session)
            session.abandon()
            listening.cancel()
            going_on.cancel()
            await asyncio.wait([listening, going_on])

    def end_sessions(self) -> None:
        """Tell every worker that this server stops."""
        for session in self._sessions:
            session.end(ShardringError(Reason.SHUTTING_DOWN, "The downloads service is stopping."))


def _replaced_by(new: WorkerSession, old: WorkerSession) -> ShardringError:
    return ShardringError(
        Reason.NODE_ID_DUPLICATE,
        f"Another downloads worker attached with node id {new.node_id!r}. If two machines share "
        "the id, remove one's identity file.",
        metadata={"node_id": new.node_id, "held_by": old.peer, "claimed_by": new.peer},
    )
