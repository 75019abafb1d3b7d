"""A real downloads process, real workers, and waiting with a deadline."""

import asyncio
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from services.common.addresses import HostPort, parse_host_port
from services.common.channel import Remote
from services.downloads.worker.engine import Probe, no_probe
from services.downloads.worker.options import CacheOptions
from services.downloads.worker.transfers import InUse
from services.downloads.worker.ways import Ways, no_ways
from services.downloads.worker.worker import DownloadsWorker
from shardring.common.v1.common_pb2 import LayerRange
from shardring.downloads.v1 import downloads_pb2
from shardring.downloads.v1 import downloads_service_pb2 as pb
from shardring.downloads.v1.downloads_service_pb2_grpc import DownloadsServiceStub

LIMIT_SECONDS = 20.0
ENDED = (
    downloads_pb2.DOWNLOAD_STATE_COMPLETED,
    downloads_pb2.DOWNLOAD_STATE_FAILED,
    downloads_pb2.DOWNLOAD_STATE_CANCELLED,
)


@contextmanager
def downloads_process(port: int = 0) -> Iterator[HostPort]:
    """Run the service as a process of its own; yield where it listens."""
    command = [sys.executable, "-m", "services.downloads", "--listen", f"127.0.0.1:{port}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        yield parse_host_port(line.rsplit(" ", 1)[1])
    finally:
        process.terminate()
        assert process.wait(timeout=10) == 0


async def eventually(
    condition: Callable[[], Awaitable[bool]], within: float = LIMIT_SECONDS
) -> None:
    """Wait until the condition holds; fail when it does not in time."""
    async with asyncio.timeout(within):
        while not await condition():
            await asyncio.sleep(0.02)


@dataclass
class Lab:
    """A client of the service, and workers whose caches lie under one folder."""

    remote: Remote
    folder: Path
    endpoint: str = ""
    rescan_seconds: float = 0.2
    _running: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.stub = DownloadsServiceStub(self.remote.channel)

    def cache(self, node_id: str) -> Path:
        return self.folder / node_id / "hub"

    async def worker(
        self,
        *,
        node_id: str = "",
        offline: bool = False,
        token: str | None = None,
        in_use: InUse = dict,
        ways: Ways = no_ways,
        hub_port: int = 0,
        probe: Probe = no_probe,
        **limits: float,
    ) -> str:
        """Start a worker and wait until it is attached; return its node id.

        `limits` are further fields of CacheOptions.
        """
        node_id = node_id or f"n-{uuid.uuid4().hex[:8]}"
        options = CacheOptions(
            cache_dir=self.cache(node_id),
            endpoint=self.endpoint,
            offline=offline,
            token=token,
            rescan_seconds=self.rescan_seconds,
        )
        options = replace(options, **limits)  # type: ignore[arg-type]
        worker = DownloadsWorker(
            node_id, self.remote, options, ways=ways, hub_port=hub_port, in_use=in_use, probe=probe
        )
        self._running[node_id] = asyncio.create_task(worker.run())
        await eventually(lambda: self.attached(node_id))
        return node_id

    async def attached(self, node_id: str) -> bool:
        """True once commands reach the node: it refuses to remove what it has not got."""
        try:
            await self.stub.DeleteModel(
                pb.DeleteModelRequest(node_id=node_id, model_id="none/such"), timeout=5
            )
        except Exception as error:
            return "not on this node's disk" in str(error)
        return False

    async def stop_worker(self, node_id: str) -> None:
        task = self._running.pop(node_id)
        task.cancel()
        await asyncio.wait([task])

    async def close(self) -> None:
        for node_id in list(self._running):
            await self.stop_worker(node_id)

    async def start(
        self,
        node_id: str,
        model_id: str,
        layers: tuple[int, int] | None = None,
        revision: str = "",
    ) -> downloads_pb2.Download:
        request = pb.StartDownloadRequest(
            node_id=node_id,
            model_id=model_id,
            revision=revision,
            layers=LayerRange(start=layers[0], end=layers[1]) if layers else None,
        )
        return (await self.remote.unary(self.stub.StartDownload, request, timeout=10)).download

    async def watch(self, download_id: str) -> list[downloads_pb2.Download]:
        """Return a download as its watcher sees it, up to its end."""
        history: list[downloads_pb2.Download] = []
        request = pb.WatchDownloadsRequest(download_ids=[download_id])
        async with asyncio.timeout(LIMIT_SECONDS):
            async for message in self.remote.stream(self.stub.WatchDownloads, request):
                history += message.downloads
                if history and history[-1].state in ENDED:
                    return history
        raise AssertionError("the watch ended early")

    async def fetch(
        self,
        node_id: str,
        model_id: str,
        layers: tuple[int, int] | None = None,
        revision: str = "",
    ) -> downloads_pb2.Download:
        """Start a download and return it as it ended."""
        started = await self.start(node_id, model_id, layers, revision)
        return (await self.watch(started.download_id))[-1]

    async def get(self, download_id: str) -> downloads_pb2.Download:
        request = pb.GetDownloadRequest(download_id=download_id)
        return (await self.remote.unary(self.stub.GetDownload, request, timeout=10)).download

    async def fraction(
        self, node_id: str, model_id: str, revision: str = ""
    ) -> downloads_pb2.NodeFraction:
        request = pb.GetFractionsRequest(model_id=model_id, node_ids=[node_id], revision=revision)
        response = await self.remote.unary(self.stub.GetFractions, request, timeout=10)
        return response.fractions[0]

    async def model(self, model_id: str, revision: str = "") -> downloads_pb2.Model:
        request = pb.GetModelRequest(model_id=model_id, revision=revision)
        return (await self.remote.unary(self.stub.GetModel, request, timeout=20)).model


@asynccontextmanager
async def lab(service: HostPort, folder: Path, endpoint: str) -> AsyncIterator[Lab]:
    """Give a lab, and stop its workers at the end."""
    remote = Remote("downloads", [service])
    here = Lab(remote, folder, endpoint)
    try:
        yield here
    finally:
        await here.close()
        await remote.close()
