"""What a runner tells of its instances while they work, and of how their processes ended.

Two nodes' runners are served in this process, with real children in a real MLX ring.
"""

import asyncio
import contextlib
import shutil
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from services.common.errors import Reason
from shardring.runner.v1 import instance_service_pb2 as pb
from shardring.runner.v1 import runner_pb2, shard_service_pb2
from tests.contract.runner_lab import Node, children, place, start_node, text, three_nodes
from tests.fakes.files_on_disk import MODEL, FilesOnDisk

pytestmark = pytest.mark.asyncio(loop_scope="module")

FAILED = runner_pb2.INSTANCE_STATE_FAILED


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def nodes() -> AsyncIterator[list[Node]]:
    async with three_nodes() as started:
        yield started


async def told(
    node: Node, instance_id: str, wanted: Callable[[runner_pb2.Instance], bool]
) -> runner_pb2.Instance:
    """Return an instance as a watch tells it once it is as wanted."""
    request = pb.WatchInstanceRequest(instance_id=instance_id)
    watch = node.remote.stream(node.instances.WatchInstance, request, timeout=60)
    async with contextlib.aclosing(watch):
        async for message in watch:
            if wanted(message.instance):
                return message.instance
    raise AssertionError("the instance ended")


def at_work(instance: runner_pb2.Instance) -> bool:
    return (
        instance.load.running_count == 2
        and instance.load.completion_tokens_per_second > 0
        and all(shard.usage.busy_fraction > 0 for shard in instance.shards)
    )


def idle(instance: runner_pb2.Instance) -> bool:
    return instance.load == runner_pb2.InstanceLoad() and all(
        shard.usage.busy_fraction == 0 and shard.usage.cache_bytes == 0 for shard in instance.shards
    )


async def test_load_and_usage_while_it_works_and_none_when_idle_or_over(nodes: list[Node]) -> None:
    head, other = nodes[:2]
    await head.ready("seen", place(nodes[:2], [3]))
    assert (await head.get("seen")).HasField("load")
    assert not (await other.get("seen")).HasField("load"), "only the head knows"
    sampling = runner_pb2.Sampling(temperature=5, seed=3)
    request = pb.GenerateRequest(instance_id="seen", input=text("Go on:"), sampling=sampling)
    request.stop.ignore_end_tokens = True
    streams = [head.remote.stream(head.instances.Generate, request) for _ in range(2)]

    async def read(stream: AsyncIterator[pb.GenerateResponse]) -> None:
        async for _ in stream:
            pass

    readers = [asyncio.create_task(read(stream)) for stream in streams]
    try:
        busy = await told(head, "seen", at_work)
        assert 0 < busy.load.batch_occupancy <= 2
        for shard in busy.shards:
            assert shard.usage.busy_fraction <= 1
            assert shard.usage.cache_bytes > 0
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
    await told(head, "seen", idle)
    run_id = head.runner._instances["seen"].run_id
    await head.stop("seen")
    over = await other.get("seen")
    assert not (await head.get("seen")).HasField("load")
    assert not any(shard.HasField("usage") for shard in over.shards)
    assert over.shards[1].log_lines[-1].startswith("Process ")
    # The other ranks are told of a log only where something failed.
    watched = shard_service_pb2.WatchShardRequest(instance_id="seen", run_id=run_id)
    watch = other.remote.stream(other.shards.WatchShard, watched, timeout=30)
    (shard,) = [message.shard async for message in watch]
    assert (shard.state, list(shard.log_lines)) == (runner_pb2.SHARD_STATE_STOPPED, [])


async def test_how_a_killed_process_ended_is_kept_and_told_to_all(nodes: list[Node]) -> None:
    await nodes[0].ready("shot", place(nodes[:2], [3]))
    victim = children("shot")[1]
    victim.send_signal(signal.SIGKILL)
    for node in nodes[:2]:
        instance = await node.until("shot", FAILED)
        assert instance.error.metadata["rank"] == "1"
    expected = f"Process {victim.pid} was killed by SIGKILL."
    for node in nodes[:2]:
        failed = await told(node, "shot", lambda i: all(s.state >= 10 for s in i.shards))
        assert failed.shards[1].log_lines[-1] == expected
    own = (await nodes[0].get("shot")).shards[0]
    assert own.log_lines[-1].startswith("Process ")
    listing = await nodes[0].remote.unary(
        nodes[0].instances.ListInstances, pb.ListInstancesRequest(), timeout=10
    )
    (listed,) = (i for i in listing.instances if i.instance_id == "shot")
    assert not any(shard.log_lines for shard in listed.shards), "lists are kept short"


async def test_a_process_that_breaks_says_why_in_its_log(nodes: list[Node], tmp_path: Path) -> None:
    shutil.copytree(MODEL, tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text("{")

    node = await start_node("node-broken", FilesOnDisk(tmp_path / "model"))
    try:
        await node.start("broken", place([node], []))
        instance = await node.until("broken", FAILED)
        lines = list(instance.shards[0].log_lines)
        assert "Load failed" in "\n".join(lines)
        assert lines[-1].startswith("Process ")
        assert len(lines) <= 50
        assert instance.error.reason == Reason.SHARD_FAILED
    finally:
        await node.runner.close("is stopping")
        await node.remote.close()
        await node.server.stop()
