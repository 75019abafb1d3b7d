"""Files come from nodes that have them; a neighbour's fault costs a try elsewhere and no more."""

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from services.common.addresses import HostPort
from services.common.channel import Remote
from services.downloads.worker.node_hub import NodeHub
from services.downloads.worker.ways import Way
from shardring.downloads.v1 import downloads_pb2
from shardring.downloads.v1 import downloads_service_pb2 as pb
from tests.contract.downloads_lab import Lab, downloads_process, eventually
from tests.fakes.faulty_hub import FaultyHub
from tests.fakes.lying_node import FAULTS, LIES, LyingNode
from tests.fakes.tiny_model import write_model
from tests.processes import children_with

MODEL = "org/big"
LAYER_BYTES = 2**20
HOST = "127.0.0.1"

COMPLETED = downloads_pb2.DOWNLOAD_STATE_COMPLETED
CANCELLED = downloads_pb2.DOWNLOAD_STATE_CANCELLED
ONGOING = downloads_pb2.DOWNLOAD_STATE_ONGOING


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder / MODEL, layer_bytes=LAYER_BYTES)
    return folder


def near(node_id: str) -> list[Way]:
    """All nodes are reached, none was measured."""
    return [Way(HOST, None)]


def exact(done: downloads_pb2.Download, models: Path) -> None:
    """Require a download that is whole, byte for byte."""
    assert done.state == COMPLETED, done.error
    assert done.downloaded_bytes == done.total_bytes
    for file in done.files:
        found = (Path(done.snapshot_path) / file.name).read_bytes()
        right = (models / MODEL / file.name).read_bytes()
        assert hashlib.sha256(found).digest() == hashlib.sha256(right).digest(), file.name


def bodies(hub: FaultyHub) -> list[str]:
    """Return the files whose whole content the hub was asked for, once for each request."""
    return sorted(request.name for request in [*hub.asked("body"), *hub.asked("text")])


@asynccontextmanager
async def serving(here: Lab, node_id: str) -> AsyncIterator[None]:
    """Run a worker whose cache folder other nodes are served from."""
    hub = NodeHub(here.cache(node_id))
    port = await hub.start(HostPort(HOST, 0))
    await here.worker(node_id=node_id, ways=near, hub_port=port)
    try:
        yield
    finally:
        await here.stop_worker(node_id)
        await hub.stop()


@asynccontextmanager
async def spoiled(here: Lab, hub: FaultyHub, node_id: str, fault: str) -> AsyncIterator[LyingNode]:
    """Run a worker that has the model, and serves it badly."""
    liar = LyingNode(here.cache(node_id), fault)
    port = await liar.start()
    await here.worker(node_id=node_id, hub_port=port)
    assert (await here.fetch(node_id, MODEL)).state == COMPLETED
    hub.seen.clear()
    try:
        yield liar
    finally:
        await here.stop_worker(node_id)
        await liar.stop()


async def test_three_nodes_fetch_each_file_from_the_hub_once(
    here: Lab, hub: FaultyHub, models: Path
) -> None:
    nodes = ["n-a", "n-b", "n-c"]
    async with serving(here, "n-a"), serving(here, "n-b"), serving(here, "n-c"):
        ended = await asyncio.gather(*(here.fetch(node, MODEL) for node in nodes))
    for done in ended:
        exact(done, models)
    asked = bodies(hub)
    assert asked == sorted(file.name for file in ended[0].files)
    total = ended[0].total_bytes
    assert sum(done.received_from_hub_bytes for done in ended) == total
    assert sum(done.received_from_nodes_bytes for done in ended) == 2 * total
    for done in ended:
        assert done.received_from_hub_bytes + done.received_from_nodes_bytes == total
        assert done.bytes_per_second == 0
        assert not any(file.source_node_id or file.bytes_per_second for file in done.files)


@pytest.mark.parametrize("lie", LIES)
async def test_a_neighbour_that_lies_is_left_out_and_named_once(
    here: Lab, hub: FaultyHub, models: Path, lie: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with spoiled(here, hub, "n-liar", lie) as liar:
        await here.worker(node_id="n-good", ways=near, parallel_files=1)
        with caplog.at_level(logging.WARNING):
            done = await here.fetch("n-good", MODEL)
        exact(done, models)
        assert len(liar.asked) == 1
        named = [record for record in caplog.records if "n-liar" in record.getMessage()]
        assert len(named) == 1, named
        weights = {name for name in bodies(hub) if name.endswith(".safetensors")}
        assert len(weights) == 3
        # What it sent is thrown away, not added to.
        assert not any(request.range for request in hub.asked("body"))


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_neighbour_that_stalls_or_dies_costs_a_try_elsewhere(
    here: Lab, hub: FaultyHub, models: Path, fault: str
) -> None:
    async with spoiled(here, hub, "n-ill", fault) as ill:
        await here.worker(node_id="n-good", ways=near, parallel_files=1)
        done = await here.fetch("n-good", MODEL)
        exact(done, models)
        assert len(ill.asked) == 1
        weights = hub.asked("body")
        assert len(weights) == 3
        # Gone on with from what it sent.
        ranges = [request.range for request in weights if request.range]
        assert len(ranges) == (fault in ("stall", "slow", "die"))
        received = done.received_from_hub_bytes + done.received_from_nodes_bytes
        assert received == done.total_bytes


async def test_parts_that_do_not_fit_together_are_fetched_anew(
    here: Lab, hub: FaultyHub, models: Path
) -> None:
    async with spoiled(here, hub, "n-ill", "") as ill:
        # The beginning of the right file, but for one bit, as a node might have left it.
        (listed,) = (here.cache("n-ill")).rglob("trees/*.json")
        name = "model-00002-of-00003.safetensors"
        (etag,) = [link.resolve().name for link in here.cache("n-ill").rglob(f"snapshots/*/{name}")]
        part = bytearray((models / MODEL / name).read_bytes()[: LAYER_BYTES // 2])
        part[1000] ^= 1
        blobs = here.cache("n-good") / "models--org--big" / "blobs"
        blobs.mkdir(parents=True)
        (blobs / f"{etag}.incomplete").write_bytes(part)
        assert listed.is_file()
        await here.worker(node_id="n-good", ways=near)
        exact(await here.fetch("n-good", MODEL), models)
        # Once more from the hub, from its beginning; the rest came from the neighbour.
        assert [(request.name, request.range) for request in hub.asked("body")] == [(name, "")]
        assert f"bytes={len(part)}-" in [asked[0] for asked in ill.asked]


async def test_a_neighbour_gets_no_token(here: Lab, hub: FaultyHub, models: Path) -> None:
    async with spoiled(here, hub, "n-ill", "") as ill:
        await here.worker(node_id="n-good", ways=near, token="hf_secret")
        done = await here.fetch("n-good", MODEL)
        exact(done, models)
        assert {authorization for _, authorization in ill.asked} == {""}
        assert done.received_from_nodes_bytes == done.total_bytes
        assert bodies(hub) == []


async def test_a_node_that_is_not_reached_is_not_waited_for(
    here: Lab, hub: FaultyHub, models: Path
) -> None:
    async with spoiled(here, hub, "n-far", "") as far:
        await here.worker(node_id="n-good")
        exact(await here.fetch("n-good", MODEL), models)
        assert far.asked == []


async def test_a_download_goes_on_while_the_service_is_away(
    hub: FaultyHub, models: Path, tmp_path: Path
) -> None:
    hub.faults.stall_after = LAYER_BYTES
    with downloads_process() as address:
        here = Lab(Remote("downloads", [address]), tmp_path, hub.endpoint)
        node = await here.worker(ways=near, parallel_files=1)
        await here.start(node, MODEL)
        await asyncio.wait_for(hub.stalled.wait(), 20)
    # Files whose source nobody had said yet are left.
    hub.faults.stall_after = None

    async def whole() -> bool:
        found = {path.name: path for path in here.cache(node).rglob("snapshots/*/*.safetensors")}
        return len(found) == 3 and all(
            path.read_bytes() == (models / MODEL / name).read_bytes()
            for name, path in found.items()
        )

    await eventually(whole)
    with downloads_process(address.port):

        async def known() -> bool:
            return (await here.fraction(node, MODEL)).state == COMPLETED

        await eventually(lambda: here.attached(node))
        await eventually(known)
    await here.close()
    await here.remote.close()


async def test_cancelling_does_not_wait_for_a_neighbour_that_is_silent(
    here: Lab, hub: FaultyHub
) -> None:
    async with spoiled(here, hub, "n-ill", "stall") as ill:
        await here.worker(node_id="n-good", ways=near)
        started = await here.start("n-good", MODEL)

        async def stalled() -> bool:
            return bool(ill.sent_bytes)

        await eventually(stalled)
        request = pb.CancelDownloadRequest(download_id=started.download_id)
        response = await here.remote.unary(here.stub.CancelDownload, request, timeout=1)
        assert response.download.state == CANCELLED
        assert children_with("worker.fetch") == []
