"""The worker's process is killed at random moments; what comes out is whole and right each time."""

import asyncio
import random
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from services.common.addresses import HostPort
from shardring.common.v1.common_pb2 import LayerRange
from shardring.downloads.v1 import downloads_pb2
from shardring.downloads.v1 import downloads_service_pb2 as pb
from tests.contract.downloads_lab import eventually, lab
from tests.fakes.faulty_hub import FaultyHub
from tests.fakes.tiny_model import write_model
from tests.processes import children_with

MODEL = "org/big"
NODE = "n-killed"
LAYER_BYTES = 3 * 2**20
BYTES_PER_SECOND = 30 * 2**20
MOMENTS = 10


@pytest.fixture
async def hub(tmp_path: Path) -> AsyncIterator[FaultyHub]:
    write_model(tmp_path / "models" / MODEL, layer_bytes=LAYER_BYTES)
    hub = FaultyHub(tmp_path / "models")
    # Slow enough for a moment to be in the middle.
    hub.faults.bytes_per_second = BYTES_PER_SECOND
    await hub.start()
    yield hub
    await hub.stop()


@asynccontextmanager
async def killed_at_last(process: Process) -> AsyncIterator[Process]:
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def worker(service: HostPort, cache: Path, endpoint: str) -> Process:
    command = ["-m", "tests.fakes.downloads_node", NODE, str(service), str(cache), endpoint]
    return await asyncio.create_subprocess_exec(sys.executable, *command)


def on_disk(cache: Path) -> int:
    """Return the bytes of blobs, whole or not."""
    sizes = []
    for path in cache.glob("*/blobs/*"):
        try:
            sizes.append(path.stat().st_size)
        except FileNotFoundError:
            continue  # Renamed just now.
    return sum(sizes)


async def test_ten_kills_ten_whole_models(
    service: HostPort, hub: FaultyHub, tmp_path: Path
) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    cache = tmp_path / "hub"
    source = hub.folder / MODEL
    total = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    async with lab(service, tmp_path, hub.endpoint) as here:
        running = await worker(service, cache, hub.endpoint)
        for moment in range(MOMENTS):
            print(f"moment {moment}")
            async with killed_at_last(running):
                await eventually(lambda: here.attached(NODE))
                await here.start(NODE, MODEL)
                # Some moments lie before the first byte, when the plan is made.
                wanted = chance.uniform(-0.1, 0.95) * total
                async with asyncio.timeout(20):
                    while on_disk(cache) < wanted:
                        await asyncio.sleep(chance.uniform(0, 0.02))
                children = children_with("worker.fetch", running.pid)
                running.kill()
                await running.wait()

            # Nothing goes on writing that nobody watches.
            _, alive = await asyncio.to_thread(psutil.wait_procs, children, 10)
            assert alive == []
            running = await worker(service, cache, hub.endpoint)
            await eventually(lambda: here.attached(NODE))
            done = await here.fetch(NODE, MODEL)
            assert done.state == downloads_pb2.DOWNLOAD_STATE_COMPLETED, (moment, done.error)
            assert done.downloaded_bytes == done.total_bytes
            for file in done.files:
                found = (Path(done.snapshot_path) / file.name).read_bytes()
                assert found == (source / file.name).read_bytes(), (moment, file.name)
            assert not list(cache.rglob("*.incomplete")), moment
            request = pb.DeleteModelRequest(node_id=NODE, model_id=MODEL)
            await here.remote.unary(here.stub.DeleteModel, request, timeout=10)
        async with killed_at_last(running):
            pass


async def test_a_node_that_restarts_goes_on_by_itself(
    service: HostPort, hub: FaultyHub, tmp_path: Path
) -> None:
    cache = tmp_path / "hub"
    async with lab(service, tmp_path, hub.endpoint) as here:
        async with killed_at_last(await worker(service, cache, hub.endpoint)) as first:
            await eventually(lambda: here.attached(NODE))
            started = await here.start(NODE, MODEL)
            request = pb.StartDownloadRequest(
                node_id=NODE, model_id=MODEL, layers=LayerRange(start=0, end=1), instance_id="i-1"
            )
            for_instance = await here.remote.unary(here.stub.StartDownload, request, timeout=10)
            async with asyncio.timeout(20):
                while on_disk(cache) < LAYER_BYTES:
                    await asyncio.sleep(0.01)
            first.kill()
            await first.wait()
        held = on_disk(cache)
        assert held >= LAYER_BYTES
        hub.seen.clear()
        async with killed_at_last(await worker(service, cache, hub.endpoint)):
            # Nobody asks again: whoever followed it follows on.
            done = (await here.watch(started.download_id))[-1]
            assert done.state == downloads_pb2.DOWNLOAD_STATE_COMPLETED, done.error
            assert done.received_from_hub_bytes <= done.total_bytes - held // 2
            # The instance ended with its node.
            ended = await here.get(for_instance.download.download_id)
            assert ended.state == downloads_pb2.DOWNLOAD_STATE_FAILED
