"""What instances have to do with downloads: they want them, no longer want them, and hold files."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from huggingface_hub import HfApi

from services.common.addresses import HostPort
from services.common.errors import Reason, ShardringError
from services.runner.adapters.files import Files
from shardring.downloads.v1 import downloads_pb2
from shardring.downloads.v1 import downloads_service_pb2 as pb
from shardring.placement.v1 import placement_pb2
from shardring.runner.v1 import runner_pb2
from tests.contract import runner_lab
from tests.contract.downloads_lab import Lab, eventually, lab
from tests.contract.runner_lab import LAYERS, Node, place, start_node
from tests.fakes.faulty_hub import FaultyHub
from tests.fakes.files_on_disk import MODEL
from tests.processes import children_with

TINY_FACTS = "shardring/tiny-facts"
ONGOING = downloads_pb2.DOWNLOAD_STATE_ONGOING
COMPLETED = downloads_pb2.DOWNLOAD_STATE_COMPLETED
CANCELLED = downloads_pb2.DOWNLOAD_STATE_CANCELLED
NODE = "node-with-disk"


@dataclass
class Here:
    """A node with a runner and a downloads worker, and the hub it gets its models from."""

    downloads: Lab
    node: Node
    hub: FaultyHub
    commit: str

    def placement(self) -> placement_pb2.Placement:
        placement = place([self.node], [])
        placement.commit = self.commit
        return placement

    async def fetching(self, instance_id: str) -> downloads_pb2.Download:
        """Start an instance; return its download once that is under way and stalled."""
        self.hub.faults.stall_after = 100_000
        await self.node.start(instance_id, self.placement())
        await asyncio.wait_for(self.hub.stalled.wait(), 20)
        return (await self.list_downloads()).downloads[0]

    async def list_downloads(self) -> pb.ListDownloadsResponse:
        request = pb.ListDownloadsRequest(node_id=NODE)
        stub = self.downloads.stub
        return await self.downloads.remote.unary(stub.ListDownloads, request, timeout=5)

    async def cancel(self, download_id: str, instance_id: str = "") -> downloads_pb2.Download:
        request = pb.CancelDownloadRequest(download_id=download_id, instance_id=instance_id)
        call = self.downloads.remote.unary(self.downloads.stub.CancelDownload, request, timeout=5)
        return (await call).download

    async def delete(self) -> int:
        request = pb.DeleteModelRequest(node_id=NODE, model_id=TINY_FACTS)
        call = self.downloads.remote.unary(self.downloads.stub.DeleteModel, request, timeout=10)
        return (await call).freed_bytes


@pytest.fixture
async def here(service: HostPort, tmp_path: Path) -> AsyncIterator[Here]:
    shutil.copytree(MODEL, tmp_path / "hub" / TINY_FACTS)
    hub = FaultyHub(tmp_path / "hub")
    await hub.start()
    info = await asyncio.to_thread(HfApi(endpoint=hub.endpoint, token=False).model_info, TINY_FACTS)
    async with lab(service, tmp_path, hub.endpoint) as downloads:
        node = await start_node(NODE, Files(NODE, downloads.remote))
        await downloads.worker(node_id=NODE, in_use=node.runner.models_in_use)
        yield Here(downloads, node, hub, str(info.sha))
        hub.faults.stall_after = None
        await node.runner.close("is stopping")
        await node.remote.close()
        await node.server.stop()
    await hub.stop()


async def test_an_instance_that_is_stopped_fetches_no_longer(here: Here) -> None:
    download = await here.fetching("one")
    assert download.state == ONGOING
    await here.node.stop("one")
    ended = (await here.downloads.watch(download.download_id))[-1]
    assert ended.state == CANCELLED
    # What came stays, and the same instance may want it again.
    here.hub.faults.stall_after = None
    await here.node.ready("one", here.placement())
    assert here.node.runner.models_in_use() == {TINY_FACTS: "one"}


async def test_an_instance_that_fails_fetches_no_longer(here: Here) -> None:
    other = await start_node("other")
    try:
        here.hub.faults.stall_after = 100_000
        placement = place([here.node, other], [LAYERS // 2])
        placement.commit = here.commit
        await here.node.start("one", placement)
        await asyncio.wait_for(here.hub.stalled.wait(), 20)
        download = (await here.list_downloads()).downloads[0]
        await other.runner.close("is stopping")
        await here.node.until("one", runner_pb2.INSTANCE_STATE_FAILED)
        ended = (await here.downloads.watch(download.download_id))[-1]
        assert ended.state == CANCELLED
        assert here.node.runner.models_in_use() == {}
    finally:
        await other.runner.close("is stopping")
        await other.remote.close()
        await other.server.stop()


async def test_an_instance_that_is_stopped_before_its_start_was_answered_fetches_nothing(
    here: Here,
) -> None:
    here.hub.faults.stall_after = 100_000
    (service,) = children_with("services.downloads")
    known = {download.download_id for download in (await here.list_downloads()).downloads}
    service.suspend()
    try:
        await here.node.start("one", here.placement())

        async def asks() -> bool:
            (shard,) = (await here.node.get("one")).shards
            return shard.state == runner_pb2.SHARD_STATE_DOWNLOADING

        await eventually(asks)
        await here.node.stop("one")
    finally:
        service.resume()

    async def cancelled() -> bool:
        listed = (await here.list_downloads()).downloads
        states = [d.state for d in listed if d.download_id not in known]
        return states == [CANCELLED]

    await eventually(cancelled)


async def test_what_another_instance_wants_goes_on(here: Here) -> None:
    download = await here.fetching("one")
    await here.node.start("two", here.placement())

    async def both_want_it() -> bool:
        shard = (await here.node.get("two")).shards[0]
        return shard.state == runner_pb2.SHARD_STATE_DOWNLOADING and shard.download_fraction > 0

    await eventually(both_want_it)
    await here.node.stop("one")
    here.hub.faults.stall_after = None
    await here.node.until("two", runner_pb2.INSTANCE_STATE_READY)
    assert (await here.downloads.get(download.download_id)).state == COMPLETED


async def test_what_a_person_wants_goes_on(here: Here) -> None:
    download = await here.fetching("one")
    joined = await here.downloads.start(NODE, TINY_FACTS, (0, LAYERS), here.commit)
    assert joined.download_id == download.download_id
    await here.node.stop("one")
    # It is told in the background; once more, and heard out, it is the same.
    assert (await here.cancel(download.download_id, "one")).state == ONGOING
    here.hub.faults.stall_after = None
    ended = (await here.downloads.watch(download.download_id))[-1]
    assert ended.state == COMPLETED


async def test_a_person_may_stop_what_an_instance_wants(here: Here) -> None:
    download = await here.fetching("one")
    assert (await here.cancel(download.download_id)).state == CANCELLED
    failed = await here.node.until("one", runner_pb2.INSTANCE_STATE_FAILED)
    assert failed.error.reason == Reason.DOWNLOAD_FAILED
    assert "cancelled" in failed.error.message


async def test_a_model_is_not_deleted_under_a_live_shard(here: Here) -> None:
    await here.node.ready("one", here.placement())
    with pytest.raises(ShardringError) as refused:
        await here.delete()
    assert refused.value.reason is Reason.MODEL_IN_USE
    assert refused.value.metadata == {
        "model_id": TINY_FACTS,
        "node_id": NODE,
        "instance_id": "one",
    }
    assert "shardring down one" in refused.value.message
    assert await here.node.answer("one", runner_lab.FACTS[0][0])
    await here.node.stop("one")
    assert await here.delete() > 100_000
    assert not (here.downloads.cache(NODE) / "models--shardring--tiny-facts").exists()
