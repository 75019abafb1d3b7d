"""What a worker has to tell the service: answers, and whatever changed, newest state only."""

import asyncio
import dataclasses
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping

from services.downloads.domain.records import CachedModel, Download
from services.downloads.rpc.convert import cached_to_proto, download_to_proto
from shardring.downloads.v1.downloads_service_pb2 import (
    AttachWorkerRequest,
    CommandResult,
    WorkerHello,
)
from shardring.downloads.v1.downloads_service_pb2 import (
    CachedModel as CachedModelMessage,
)


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
    ) -> None:
        self._node_id = node_id
        self._downloads = downloads
        self._read_model = read_model
        self._available_bytes = available_bytes
        self._results: deque[CommandResult] = deque()
        self._changed_downloads: set[str] = set()
        self._changed_models: set[str] = set()
        self._told: dict[tuple[str, str], CachedModel] = {}
        self._wake = asyncio.Event()

    def answer(self, result: CommandResult) -> None:
        """Send the answer to a command."""
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

    def models_seen(self, models: Iterable[CachedModel]) -> None:
        """Look again at the models that differ from what the service was told."""
        seen = {(model.model_id, model.commit): model for model in models}
        for key in seen.keys() | self._told.keys():
            if seen.get(key) != self._told.get(key):
                self.model_changed(key[0])

    async def messages(self, models: Iterable[CachedModel]) -> AsyncIterator[AttachWorkerRequest]:
        """Yield the hello, with `models` on disk, then answers and changes for ever."""
        models = list(models)
        self._told = {(model.model_id, model.commit): model for model in models}
        hello = WorkerHello(
            node_id=self._node_id,
            cached_models=map(cached_to_proto, models),
            downloads=map(download_to_proto, self._downloads.values()),
            disk_available_bytes=await asyncio.to_thread(self._available_bytes),
        )
        yield AttachWorkerRequest(hello=hello)
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._results:
                yield AttachWorkerRequest(result=self._results.popleft())
            # A model first: who sees its download COMPLETED finds the fraction right.
            changed, self._changed_models = self._changed_models, set()
            ids, self._changed_downloads = self._changed_downloads, set()
            for model_id in sorted(changed):
                for message in await self._model_news(model_id):
                    yield AttachWorkerRequest(cached_model=message)
            for download_id in sorted(ids & self._downloads.keys()):
                yield AttachWorkerRequest(download=download_to_proto(self._downloads[download_id]))

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
