"""Many downloads workers in one process: what they report and ask at the pace they are told.

    python -m tests.benchmarks.workers DOWNLOADS_ADDRESS NODE_COUNT

Every worker has a connection of its own and fetches the same models, so that each waits for others:
it reports each download, and the model it is of, as soon as it may, and asks where to take the
remaining files from as often as the service wants it to. Says "settled" on standard output once
every download has been reported a few times.
"""

import asyncio
import random
import sys
import time
from collections.abc import AsyncIterator

from services.common.addresses import HostPort, parse_host_port
from services.common.channel import Remote
from shardring.downloads.v1 import downloads_pb2
from shardring.downloads.v1 import downloads_service_pb2 as pb
from shardring.downloads.v1.downloads_service_pb2_grpc import DownloadsServiceStub
from tests.benchmarks.serving import give_way

DOWNLOADS_EACH = 4
FILES_EACH = 16
FETCHED_AT_A_TIME = 4
COMMIT = "c" * 40
_FILE_BYTES = 5 * 2**30
_START_SECONDS = 4.0
_SETTLED_REPORTS = 3
_TIMEOUT_SECONDS = 30


class Fetch:
    """One download, and the model that it fills."""

    def __init__(self, node_id: str, number: int) -> None:
        names = [
            f"model-{file + 1:05}-of-{FILES_EACH:05}.safetensors" for file in range(FILES_EACH)
        ]
        self.download = downloads_pb2.Download(
            download_id=f"d-{node_id}-{number}",
            node_id=node_id,
            model_id=f"organisation/model-{number}-8bit",
            commit=COMMIT,
            revision="main",
            state=downloads_pb2.DOWNLOAD_STATE_ONGOING,
            total_bytes=FILES_EACH * _FILE_BYTES,
            files=[
                downloads_pb2.FileProgress(name=name, total_bytes=_FILE_BYTES) for name in names
            ],
        )
        self.download.create_time.GetCurrentTime()
        self.cached = pb.CachedModel(
            model_id=self.download.model_id,
            commit=COMMIT,
            revisions=["main"],
            total_bytes=self.download.total_bytes,
        )
        self.reports = 0

    def go_on(self) -> None:
        """Gain something in a few of the files, as if from the hub and another node."""
        self.reports += 1
        speed = random.randrange(2**26, 2**27)
        for number, file in enumerate(self.download.files[:FETCHED_AT_A_TIME]):
            file.downloaded_bytes = min(_FILE_BYTES - 1, file.downloaded_bytes + 2**20)
            file.bytes_per_second = speed
            file.time_left.FromSeconds(60)
            file.source_node_id = "another" if number % 2 else ""
        self.download.bytes_per_second = speed * FETCHED_AT_A_TIME
        self.download.downloaded_bytes = sum(file.downloaded_bytes for file in self.download.files)
        self.download.time_left.FromSeconds(600)
        self.download.update_time.GetCurrentTime()
        self.cached.downloaded_bytes = self.download.downloaded_bytes

    def waiting(self) -> list[str]:
        """Return the files that it needs and is not fetching."""
        return [file.name for file in self.download.files[FETCHED_AT_A_TIME:]]


class Worker:
    """One node's stream and calls."""

    def __init__(self, downloads: HostPort, number: int) -> None:
        self.remote = Remote("downloads", [downloads])
        self.settled = asyncio.Event()
        self._stub = DownloadsServiceStub(self.remote.channel)
        self._node_id = f"{number:032x}"
        self._fetches = [Fetch(self._node_id, number) for number in range(DOWNLOADS_EACH)]
        self._pace = 0.5
        self._attached = asyncio.Event()

    async def run(self) -> None:
        """Report and ask until cancelled."""
        await asyncio.sleep(random.uniform(0, _START_SECONDS))
        async with asyncio.TaskGroup() as group:
            group.create_task(self._attach())
            await self._attached.wait()
            for fetch in self._fetches:
                group.create_task(self._ask(fetch))

    async def _attach(self) -> None:
        call = self._stub.AttachWorker(self._reports())
        async for command in call:
            self._pace = command.welcome.min_report_interval.ToNanoseconds() / 1e9
            self._attached.set()

    async def _reports(self) -> AsyncIterator[pb.AttachWorkerRequest]:
        hello = pb.WorkerHello(
            node_id=self._node_id,
            cached_models=[fetch.cached for fetch in self._fetches],
            downloads=[fetch.download for fetch in self._fetches],
            hub_port=52421,
        )
        yield pb.AttachWorkerRequest(hello=hello)
        await self._attached.wait()
        due = {index: time.monotonic() + random.uniform(0, self._pace) for index in range(4)}
        while True:
            index = min(due, key=due.__getitem__)
            await asyncio.sleep(max(0.0, due[index] - time.monotonic()))
            due[index] = time.monotonic() + self._pace
            fetch = self._fetches[index]
            fetch.go_on()
            yield pb.AttachWorkerRequest(cached_model=fetch.cached)
            yield pb.AttachWorkerRequest(download=fetch.download)
            if min(fetch.reports for fetch in self._fetches) >= _SETTLED_REPORTS:
                self.settled.set()

    async def _ask(self, fetch: Fetch) -> None:
        while True:
            request = pb.AssignSourcesRequest(
                node_id=self._node_id,
                model_id=fetch.download.model_id,
                commit=COMMIT,
                file_names=fetch.waiting(),
                max_count=FETCHED_AT_A_TIME,
            )
            answer = await self.remote.unary(
                self._stub.AssignSources, request, timeout=_TIMEOUT_SECONDS
            )
            pause = answer.retry_delay.ToNanoseconds() / 1e9
            # Whoever was told to fetch a file has something to do for a while.
            await asyncio.sleep(pause or self._pace)


async def main(downloads: HostPort, count: int) -> None:
    """Run until terminated."""
    workers = [Worker(downloads, number) for number in range(count)]
    async with asyncio.TaskGroup() as group:
        for worker in workers:
            group.create_task(worker.run())
        for worker in workers:
            await worker.settled.wait()
        print("settled", flush=True)


if __name__ == "__main__":
    give_way()
    asyncio.run(main(parse_host_port(sys.argv[1]), int(sys.argv[2])))
