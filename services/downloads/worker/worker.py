"""A node's downloads worker: attached to the downloads service for as long as the node lives."""

import asyncio
import logging
import random
from collections.abc import AsyncIterator

import grpc

from services.common.channel import Remote
from services.common.errors import Reason, ShardringError
from services.common.status import error_from_rpc, error_to_proto, known_error
from services.downloads.domain.names import check_layers, check_model_id, check_revision
from services.downloads.domain.pace import MIN_REPORT_SECONDS
from services.downloads.domain.records import CachedModel, Download, Verification
from services.downloads.rpc.convert import (
    download_to_proto,
    facts_to_proto,
    layers_from_proto,
    verification_to_proto,
)
from services.downloads.worker.assigner import Assigner
from services.downloads.worker.cache import Cache
from services.downloads.worker.engine import EngineSupport, Probe, no_probe
from services.downloads.worker.hub_threads import HubThreads
from services.downloads.worker.options import CacheOptions
from services.downloads.worker.outbox import Outbox
from services.downloads.worker.patience import ANSWER_SECONDS, DOWNLOAD_SECONDS
from services.downloads.worker.plan import Planner
from services.downloads.worker.reader import ModelReader
from services.downloads.worker.shelf import Shelf
from services.downloads.worker.sources import Hub
from services.downloads.worker.transfers import InUse, Transfers
from services.downloads.worker.verify import Verifier
from services.downloads.worker.ways import Ways, no_ways
from shardring.downloads.v1.downloads_service_pb2 import (
    AttachWorkerRequest,
    AttachWorkerResponse,
    CommandResult,
)
from shardring.downloads.v1.downloads_service_pb2_grpc import DownloadsServiceStub

logger = logging.getLogger(__name__)

_FIRST_RETRY_SECONDS = 0.5
_LAST_RETRY_SECONDS = 5.0
# Two machines with one id would throw each other out for ever: at least slowly.
_DUPLICATE_RETRY_SECONDS = 30.0


class DownloadsWorker:
    """Reports what is in the cache folder, and does what the downloads service commands.

    Downloads go on while the service is away; it learns of them when the worker attaches again.
    """

    def __init__(
        self,
        node_id: str,
        downloads: Remote,
        options: CacheOptions | None = None,
        *,
        ways: Ways = no_ways,
        hub_port: int = 0,
        in_use: InUse = dict,
        probe: Probe = no_probe,
    ) -> None:
        """`probe` finds out where models may be cut."""
        self._node_id = node_id
        self._hub_port = hub_port
        self._remote = downloads
        self._stub = DownloadsServiceStub(downloads.channel)
        self._options = options or CacheOptions()
        self._cache = Cache(self._options.cache_dir)
        self._hub = Hub(self._options)
        self._hub_threads = HubThreads(ANSWER_SECONDS)
        self._planning_threads = HubThreads(DOWNLOAD_SECONDS)
        self._reader = ModelReader(self._cache, self._hub, EngineSupport(probe))
        self._shelf = Shelf(self._cache, self._reader)
        self._assigner = Assigner(node_id, downloads)
        self._transfers = Transfers(
            node_id,
            self._options,
            self._cache,
            self._shelf,
            Planner(self._cache, self._reader, self._shelf),
            self._planning_threads,
            self._assigner,
            ways,
            self._download_changed,
            in_use,
        )
        self._verifier = Verifier(
            self._cache, self._hub, self._hub_threads, offline=self._options.offline
        )
        # By the command's id and the stream it came by; stopped when nobody waits for the answer.
        self._verifying: dict[tuple[Outbox | None, str], asyncio.Task[None]] = {}
        self._attached = False
        self._outbox: Outbox | None = None
        self._commands: set[asyncio.Task[None]] = set()
        self._unreadable: set[tuple[str, str]] = set()

    async def run(self) -> None:
        """Stay attached until cancelled; then stop every download, keeping what was fetched."""
        rescanning = asyncio.create_task(self._rescan_for_ever())
        try:
            await self._attach_for_ever()
        finally:
            tasks = [rescanning, *self._commands]
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            await self._transfers.close()
            await self._assigner.close()
            self._verifier.close()
            self._hub_threads.close()
            self._planning_threads.close()

    async def _attach_for_ever(self) -> None:
        wait, last_logged = _FIRST_RETRY_SECONDS, ""
        while True:
            self._attached = False
            error = await self._attach()
            if self._attached:
                wait, last_logged = _FIRST_RETRY_SECONDS, ""
            if error.reason != last_logged:
                logger.warning("Not attached to downloads: %s Trying again.", error.message)
                last_logged = error.reason
            if error.reason is Reason.NODE_ID_DUPLICATE:
                wait = _DUPLICATE_RETRY_SECONDS
            await asyncio.sleep(wait * random.uniform(0.8, 1.2))
            wait = min(wait * 2, _LAST_RETRY_SECONDS)

    async def _attach(self) -> ShardringError:
        """Hold one stream; return why it ended."""
        outbox = Outbox(
            self._node_id,
            self._transfers.downloads,
            self._shelf.model,
            self._cache.available_bytes,
            self._hub_port,
        )
        # Collects changes from before the disk is read, so that none is missed.
        self._outbox = outbox
        call = None
        try:
            models = await asyncio.to_thread(self._shelf.models)
            call = self._stub.AttachWorker(_logged(outbox.messages(models)))
            async for command in call:
                self._take(command)
        except grpc.aio.AioRpcError as error:
            return error_from_rpc(error, service="downloads", address=self._remote.address)
        except OSError as error:
            return ShardringError(
                Reason.INTERNAL, f"Cannot read the cache folder {self._cache.folder}: {error}."
            )
        finally:
            self._outbox = None
            for verifying in list(self._verifying.values()):
                verifying.cancel()
            if call is not None:
                call.cancel()
        return ShardringError(Reason.SERVICE_UNAVAILABLE, "The downloads service hung up.")

    def _take(self, command: AttachWorkerResponse) -> None:
        """Begin a command; each runs by itself, so a slow one holds up no other."""
        if command.WhichOneof("command") == "welcome":
            interval = command.welcome.min_report_interval.ToTimedelta().total_seconds()
            self._transfers.look_every(max(MIN_REPORT_SECONDS, interval))
            if not self._attached:
                logger.info("Attached to downloads at %s", self._remote.address)
            self._attached = True
            return
        if command.WhichOneof("command") == "stop_verify":
            key = (self._outbox, command.stop_verify.verify_command_id)
            if verifying := self._verifying.get(key):
                verifying.cancel()
            return
        task = asyncio.create_task(self._obey(command, self._outbox))
        self._commands.add(task)
        task.add_done_callback(self._commands.discard)
        if command.WhichOneof("command") == "verify_model":
            key = (self._outbox, command.command_id)
            self._verifying[key] = task
            task.add_done_callback(lambda _: self._verifying.pop(key, None))

    async def _obey(self, command: AttachWorkerResponse, outbox: Outbox | None) -> None:
        """Do what is commanded; answer on the stream it came by, even with a fault."""
        try:
            result = await self._do(command, outbox)
        except Exception as error:
            result = CommandResult(error=error_to_proto(known_error(error)))
        result.command_id = command.command_id
        if outbox is not None:
            outbox.answer(result)

    async def _do(self, command: AttachWorkerResponse, outbox: Outbox | None) -> CommandResult:
        match command.WhichOneof("command"):
            case "start_download":
                start = command.start_download
                layers = layers_from_proto(start.layers) if start.HasField("layers") else None
                download = await self._transfers.start(
                    start.download_id,
                    check_model_id(start.model_id),
                    check_revision(start.revision),
                    check_layers(layers),
                    start.instance_id,
                )
                return CommandResult(download=download_to_proto(download))
            case "cancel_download":
                download = await self._transfers.cancel(
                    command.cancel_download.download_id, command.cancel_download.instance_id
                )
                return CommandResult(download=download_to_proto(download))
            case "delete_model":
                model_id = check_model_id(command.delete_model.model_id)
                freed = await self._transfers.delete(model_id)
                if outbox := self._outbox:
                    outbox.model_changed(model_id)
                return CommandResult(freed_bytes=freed)
            case "read_model":
                read = command.read_model
                known = await self._hub_threads.run(
                    self._reader.read, check_model_id(read.model_id), check_revision(read.revision)
                )
                return CommandResult(model=facts_to_proto(known.facts))
            case "verify_model":
                model_id = check_model_id(command.verify_model.model_id)
                verification = await self._verify(model_id, command.command_id, outbox)
                return CommandResult(verification=verification_to_proto(verification))
            case other:
                raise ShardringError(
                    Reason.INTERNAL,
                    f"This worker knows no command {other!r}; the service is newer than the node.",
                )

    async def _verify(self, model_id: str, command_id: str, outbox: Outbox | None) -> Verification:
        """Compare a model's files with their hashes. Raises MODEL_IN_USE and MODEL_NOT_FOUND."""
        for download in self._transfers.downloads.values():
            if download.live and download.model_id == model_id:
                raise ShardringError(
                    Reason.MODEL_IN_USE,
                    f"{model_id} is being downloaded ({download.download_id}). Wait for that to "
                    "end, or cancel it.",
                    metadata={"model_id": model_id, "node_id": self._node_id},
                )

        def report(verification: Verification) -> None:
            if outbox is not None:
                outbox.verify_progress(command_id, verification)

        try:
            return await self._verifier.verify(model_id, report)
        finally:
            # What was corrupt is gone, also when it was stopped half-way.
            if self._outbox is not None:
                self._outbox.model_changed(model_id)

    def _download_changed(self, download: Download) -> None:
        if self._outbox is not None:
            self._outbox.download_changed(download)

    async def _rescan_for_ever(self) -> None:
        """See what other programs put into the cache folder or removed from it."""
        while True:
            await asyncio.sleep(self._options.rescan_seconds)
            if self._outbox is None:
                continue
            try:
                models = await asyncio.to_thread(self._shelf.models)
                self._outbox.models_seen(models)
                await self._learn(models)
            except Exception:
                logger.exception("Looking through the cache folder failed")

    async def _learn(self, models: list[CachedModel]) -> None:
        """Ask the hub, once, about models that the disk alone does not explain."""
        for model in models:
            key = (model.model_id, model.commit)
            if model.facts is not None or key in self._unreadable or self._options.offline:
                continue
            try:
                known = await self._hub_threads.run(self._reader.from_hub, *key)
                await asyncio.to_thread(self._reader.keep, model.model_id, known)
            except ShardringError as error:
                if error.reason is Reason.HUB_UNREACHABLE:
                    return
                logger.info("%s cannot be used: %s", model.model_id, error.message)
                self._unreadable.add(key)
            if self._outbox is not None:
                self._outbox.model_changed(model.model_id)


async def _logged(
    messages: AsyncIterator[AttachWorkerRequest],
) -> AsyncIterator[AttachWorkerRequest]:
    """Pass messages on; a fault in making one ends the stream, which is then opened anew."""
    try:
        async for message in messages:
            yield message
    except Exception:
        logger.exception("Reporting to downloads failed")
