"""One attached worker: commands go down its stream, results come back by command id."""

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from services.common import deadline
from services.common.errors import Reason, ShardringError
from services.common.status import error_from_proto
from services.downloads.domain.records import (
    CachedModel,
    Download,
    Layers,
    ModelFacts,
    Verification,
)
from services.downloads.domain.reports import (
    check_cached,
    check_disk,
    check_download,
    check_verification,
)
from services.downloads.fleet import Fleet
from services.downloads.rpc.convert import (
    cached_from_proto,
    download_from_proto,
    facts_from_proto,
    layers_to_proto,
    verification_from_proto,
)
from shardring.downloads.v1 import downloads_pb2, downloads_service_pb2
from shardring.downloads.v1.downloads_service_pb2 import (
    AttachWorkerRequest,
    AttachWorkerResponse,
    CancelDownloadCommand,
    CommandResult,
    DeleteModelCommand,
    ReadModelCommand,
    StartDownloadCommand,
    StopVerifyCommand,
    VerifyModelCommand,
    WorkerWelcome,
)

logger = logging.getLogger(__name__)

QUICK_SECONDS = 10.0
# Reading a large model's headers from a slow hub, or removing hundreds of gigabytes.
SLOW_SECONDS = 60.0
# Between two signs of life of a verification. It first may have to ask the hub for file lists.
QUIET_SECONDS = 60.0


def checked_cached(message: downloads_service_pb2.CachedModel) -> CachedModel:
    """Return a reported model. Raises INVALID_FIELD."""
    model = cached_from_proto(message)
    check_cached(model)
    return model


def checked_download(node_id: str, message: downloads_pb2.Download) -> Download:
    """Return a download that a node's worker reported. Raises INVALID_FIELD."""
    download = download_from_proto(message)
    check_download(node_id, download)
    return download


def checked_verification(message: downloads_service_pb2.Verification) -> Verification:
    """Return how far a worker's verification is. Raises INVALID_FIELD."""
    verification = verification_from_proto(message)
    check_verification(verification)
    return verification


class WorkerSession:
    """Implements `services.downloads.fleet.Worker` over one AttachWorker stream."""

    def __init__(self, node_id: str, peer: str, report_seconds: float) -> None:
        self.node_id = node_id
        self.peer = peer
        self._outgoing: asyncio.Queue[AttachWorkerResponse | ShardringError | None] = (
            asyncio.Queue()
        )
        self._waiting: dict[str, asyncio.Future[CommandResult]] = {}
        self._verifying: dict[str, asyncio.Queue[Verification]] = {}
        self._numbers = itertools.count(1)
        self.pace(report_seconds)

    async def start_download(
        self,
        download_id: str,
        model_id: str,
        revision: str,
        layers: Layers | None,
        instance_id: str,
    ) -> Download:
        """See Worker."""
        command = StartDownloadCommand(
            download_id=download_id,
            model_id=model_id,
            revision=revision,
            layers=layers_to_proto(layers),
            instance_id=instance_id,
        )
        result = await self._ask(AttachWorkerResponse(start_download=command), QUICK_SECONDS)
        return download_from_proto(result.download)

    async def cancel_download(self, download_id: str, instance_id: str) -> Download:
        """See Worker."""
        command = CancelDownloadCommand(download_id=download_id, instance_id=instance_id)
        result = await self._ask(AttachWorkerResponse(cancel_download=command), QUICK_SECONDS)
        return download_from_proto(result.download)

    async def delete_model(self, model_id: str) -> int:
        """See Worker."""
        command = DeleteModelCommand(model_id=model_id)
        result = await self._ask(AttachWorkerResponse(delete_model=command), SLOW_SECONDS)
        return result.freed_bytes

    async def read_model(self, model_id: str, revision: str) -> ModelFacts:
        """See Worker."""
        command = ReadModelCommand(model_id=model_id, revision=revision)
        result = await self._ask(AttachWorkerResponse(read_model=command), SLOW_SECONDS)
        return facts_from_proto(result.model)

    async def verify_model(self, model_id: str) -> AsyncGenerator[Verification, None]:
        """See Worker."""
        command = AttachWorkerResponse(verify_model=VerifyModelCommand(model_id=model_id))
        waiting = self._command(command)
        # Room for one: a caller that reads slowly is told the newest.
        steps = self._verifying[command.command_id] = asyncio.Queue[Verification](1)
        try:
            while not waiting.done():
                step = asyncio.ensure_future(steps.get())
                either: set[asyncio.Future[Any]] = {waiting, step}
                try:
                    done, _ = await asyncio.wait(
                        either, timeout=QUIET_SECONDS, return_when=asyncio.FIRST_COMPLETED
                    )
                finally:
                    step.cancel()
                if not done:
                    raise self._late()
                if step in done and not waiting.done():
                    yield step.result()
            yield checked_verification(_result(waiting.result()).verification)
        finally:
            del self._waiting[command.command_id], self._verifying[command.command_id]
            if not waiting.done():
                stop = StopVerifyCommand(verify_command_id=command.command_id)
                self._outgoing.put_nowait(AttachWorkerResponse(stop_verify=stop))

    def pace(self, report_seconds: float) -> None:
        """See Worker."""
        welcome = WorkerWelcome()
        welcome.min_report_interval.FromMilliseconds(round(report_seconds * 1000))
        self._outgoing.put_nowait(AttachWorkerResponse(welcome=welcome))

    async def commands(self) -> AsyncIterator[AttachWorkerResponse]:
        """Yield the welcome, then commands, until the session ends; raise why if it is told."""
        while (item := await self._outgoing.get()) is not None:
            if isinstance(item, ShardringError):
                raise item
            yield item

    async def listen(self, requests: AsyncIterator[AttachWorkerRequest], fleet: Fleet) -> None:
        """Take in what the worker reports until it hangs up."""
        try:
            async for request in requests:
                self._take(request, fleet)
        finally:
            self._outgoing.put_nowait(None)

    def end(self, error: ShardringError) -> None:
        """End the stream with an error that tells the worker why."""
        self._outgoing.put_nowait(error)

    def abandon(self) -> None:
        """Fail every command that still waits: its answer can no longer come."""
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(
                    ShardringError(
                        Reason.WORKER_NOT_ATTACHED,
                        f"The downloads worker of node {self.node_id!r} went away meanwhile.",
                        metadata={"node_id": self.node_id},
                        retry_delay_seconds=1,
                    )
                )

    def _take(self, request: AttachWorkerRequest, fleet: Fleet) -> None:
        match request.WhichOneof("report"):
            case "cached_model" if request.cached_model.removed:
                fleet.drop_cached(self.node_id, request.cached_model.model_id)
            case "cached_model":
                fleet.put_cached(self.node_id, checked_cached(request.cached_model))
            case "download":
                fleet.put(checked_download(self.node_id, request.download))
            case "result":
                if request.result.HasField("download"):
                    fleet.put(checked_download(self.node_id, request.result.download))
                waiting = self._waiting.get(request.result.command_id)
                if waiting is not None and not waiting.done():
                    waiting.set_result(request.result)
            case "verify_progress":
                step = checked_verification(request.verify_progress.verification)
                steps = self._verifying.get(request.verify_progress.command_id)
                if steps is not None:
                    if steps.full():
                        steps.get_nowait()
                    steps.put_nowait(step)
            case "disk":
                check_disk(request.disk.available_bytes)
                fleet.put_disk(self.node_id, request.disk.available_bytes)
            case other:
                logger.warning("Node %s sent %s out of turn", self.node_id, other or "nothing")

    async def _ask(self, command: AttachWorkerResponse, timeout: float) -> CommandResult:
        waiting = self._command(command)
        try:
            return _result(await asyncio.wait_for(waiting, deadline.leaving_time(timeout)))
        except TimeoutError as error:
            raise self._late() from error
        finally:
            del self._waiting[command.command_id]

    def _command(self, command: AttachWorkerResponse) -> "asyncio.Future[CommandResult]":
        """Send a command under a new id; return where its answer will be."""
        command.command_id = f"c-{next(self._numbers)}"
        waiting: asyncio.Future[CommandResult] = asyncio.get_running_loop().create_future()
        self._waiting[command.command_id] = waiting
        self._outgoing.put_nowait(command)
        return waiting

    def _late(self) -> ShardringError:
        return ShardringError(
            Reason.SERVICE_TIMEOUT,
            f"No answer in time from the downloads worker of node {self.node_id!r}.",
            metadata={"service": "downloads worker", "address": self.peer},
        )


def _result(result: CommandResult) -> CommandResult:
    """Return what a worker answered; raise what it refused with."""
    if result.HasField("error"):
        raise error_from_proto(result.error)
    return result
