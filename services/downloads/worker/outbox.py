"""What a worker has to tell the service: answers, and whatever changed, newest state only."""

import asyncio
import dataclasses
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping

from services.downloads.domain.records import CachedModel, Download, Verification
from services.downloads.rpc.convert import (
    cached_to_proto,
    download_to_proto,
    verification_to_proto,
)
from shardring.downloads.v1.downloads_service_pb2 import (
    AttachWorkerRequest,
    CommandResult,
    VerifyProgress,
    WorkerDisk,
    WorkerHello,
)
from shardring.downloads.v1.downloads_service_pb2 import (
    CachedModel as CachedModelMessage,
)

# The room on the disk is told anew when it changed by this much, or by this share of it.
_DISK_BYTES = 10**9
_DISK_SHARE = 0.01


class Outbox:
    """The requests of one AttachWorker stream.

    Changes are kept as names and turned into messages when they are sent, so a slow connection
    makes reports fewer, not late.
    """

    def __init__(
        self,
        node_id: str,
        downloads: Mapping[str, Download],
        read_model: Callable[[str], list[CachedModel]],
        available_bytes: Callable[[], int],
        hub_port: int,
    ) -> None:
        self._node_id = node_id
        self._downloads = downloads
        self._read_model = read_model
        self._available_bytes = available_bytes
        self._hub_port = hub_port
        self._results: deque[CommandResult] = deque()
        self._changed_downloads: set[str] = set()
        self._changed_models: set[str] = set()
        self._told: dict[tuple[str, str], CachedModel] = {}
        self._verifications: dict[str, Verification] = {}
        self._told_disk = 0
        self._look_at_disk = False
        self._wake = asyncio.Event()

    def answer(self, result: CommandResult) -> None:
        """Send the answer to a command."""
        self._verifications.pop(result.command_id, None)
        self._results.append(result)
        self._wake.set()

    def download_changed(self, download: Download) -> None:
        """Send how this download and its model now are."""
        self._changed_downloads.add(download.download_id)
        self.model_changed(download.model_id)

    def model_changed(self, model_id: str) -> None:
        """Look at this model on disk, and send what is new."""
        self._changed_models.add(model_id)
        self._wake.set()

    def verify_progress(self, command_id: str, verification: Verification) -> None:
        """Send how far a verification is."""
        self._verifications[command_id] = verification
        self._wake.set()

    def models_seen(self, models: Iterable[CachedModel]) -> None:
        """Look again at the models that differ from what the service was told, and at the disk."""
        self._look_at_disk = True
        self._wake.set()
        seen = {(model.model_id, model.commit): model for model in models}
        for key in seen.keys() | self._told.keys():
            if seen.get(key) != self._told.get(key):
                self.model_changed(key[0])

    async def messages(
        self, models: Iterable[CachedModel]
    ) -> AsyncGenerator[AttachWorkerRequest, None]:
        """Yield the hello, with `models` on disk, then answers and changes for ever."""
        models = list(models)
        self._told = {(model.model_id, model.commit): model for model in models}
        hello = WorkerHello(
            node_id=self._node_id,
            cached_models=map(cached_to_proto, models),
            downloads=map(download_to_proto, self._downloads.values()),
            disk_available_bytes=await self._disk(),
            hub_port=self._hub_port,
        )
        yield AttachWorkerRequest(hello=hello)
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._results:
                yield AttachWorkerRequest(result=self._results.popleft())
            # A model first: who sees its download COMPLETED finds the fraction right. So a download
            # is told as it is before its model is looked at; what comes meanwhile is told next.
            changed, self._changed_models = self._changed_models, set()
            ids, self._changed_downloads = self._changed_downloads, set()
            downloads = [self._downloads[i] for i in sorted(ids & self._downloads.keys())]
            for model_id in sorted(changed):
                for message in await self._model_news(model_id):
                    yield AttachWorkerRequest(cached_model=message)
            verifications, self._verifications = self._verifications, {}
            for command_id, verification in verifications.items():
                progress = VerifyProgress(
                    command_id=command_id, verification=verification_to_proto(verification)
                )
                yield AttachWorkerRequest(verify_progress=progress)
            look, self._look_at_disk = self._look_at_disk or bool(changed), False
            if look and (disk := await self._disk_news()) is not None:
                yield AttachWorkerRequest(disk=disk)
            for download in downloads:
                yield AttachWorkerRequest(download=download_to_proto(download))

    async def _disk(self) -> int:
        self._told_disk = await asyncio.to_thread(self._available_bytes)
        return self._told_disk

    async def _disk_news(self) -> WorkerDisk | None:
        """Return the room on the disk when it is another than was told."""
        before = self._told_disk
        if abs(await self._disk() - before) > min(_DISK_BYTES, before * _DISK_SHARE):
            return WorkerDisk(available_bytes=self._told_disk)
        self._told_disk = before
        return None

    async def _model_news(self, model_id: str) -> list[CachedModelMessage]:
        """Return what is new about a model; facts only when they are."""
        found = {
            (model.model_id, model.commit): model
            for model in await asyncio.to_thread(self._read_model, model_id)
        }
        told = {key: model for key, model in self._told.items() if key[0] == model_id}
        self._told = {key: model for key, model in self._told.items() if key[0] != model_id} | found
        if not found:
            return [CachedModelMessage(model_id=model_id, removed=True)] if told else []
        gone = [CachedModel(model_id, commit, (), 0, 0) for _, commit in told.keys() - found.keys()]
        news = []
        for key, model in found.items():
            before = told.get(key)
            if model != before:
                same = before is not None and before.facts == model.facts
                news.append(dataclasses.replace(model, facts=None) if same else model)
        return [cached_to_proto(model) for model in gone + news]
