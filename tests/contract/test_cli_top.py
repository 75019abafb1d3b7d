"""`shardring top` and `shardring logs`, against nodes that say what a test wants."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest

from shardring.runner.v1 import runner_pb2
from tests.contract.cli_lab import FakeCluster, ended, fake_cluster, instance_of, ready


@pytest.fixture
async def cluster() -> AsyncIterator[FakeCluster]:
    async with fake_cluster("ada", "bob") as cluster:
        yield cluster


@pytest.fixture
def chat(cluster: FakeCluster) -> runner_pb2.Instance:
    """An instance that both nodes list, as its head sees it; followed, it does not end."""
    head, other = cluster.nodes["ada"].runner, cluster.nodes["bob"].runner
    chat = at_work(cluster, 10.0)
    head.instances["chat"], head.changes, head.live = chat, [chat], asyncio.Queue()
    other.instances["chat"] = ready(cluster.placement.placement, rank=1)
    return chat


def at_work(cluster: FakeCluster, tokens_per_second: float) -> runner_pb2.Instance:
    made = ready(cluster.placement.placement)
    made.load.completion_tokens_per_second = tokens_per_second
    made.load.running_count = 2
    for shard in made.shards:
        shard.usage.busy_fraction = 0.5
        shard.usage.cache_bytes, shard.usage.cache_limit_bytes = 1_000_000, 4_000_000
    return made


async def next_line(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    async with asyncio.timeout(30):
        return (await process.stdout.readline()).decode()


async def next_instance(process: asyncio.subprocess.Process) -> dict[str, Any]:
    instance: dict[str, Any] = json.loads(await next_line(process))["instance"]
    return instance


async def test_top_once(cluster: FakeCluster, chat: runner_pb2.Instance) -> None:
    over = instance_of(
        cluster.ring("bob"),
        runner_pb2.INSTANCE_STATE_STOPPED,
        runner_pb2.SHARD_STATE_STOPPED,
        instance_id="over",
    )
    cluster.nodes["bob"].runner.instances["over"] = over
    run = await cluster.run("top", "--once")
    assert (run.code, run.err) == (0, "")
    assert run.out.startswith("1 instance, 10.0 tokens/s, 2 running, 0 queued\n")
    assert run.out.count("50 %  1.0 MB  1.0 MB of 4.0 MB") == 2
    assert "over" not in run.out, "what has ended is left out"
    assert max(map(len, run.out.splitlines())) < 120, "nothing is filled up to the width"
    named = await cluster.run("top", "over", "--once", "--json")
    (shown,) = named.document["instances"]
    assert shown["instance_id"] == "over"


async def test_top_of_an_unknown_instance(cluster: FakeCluster, chat: runner_pb2.Instance) -> None:
    run = await cluster.run("top", "nope", "--json")
    assert (run.code, run.error["reason"]) == (1, "INSTANCE_NOT_FOUND")
    assert "Running: chat." in run.error["message"]


async def test_top_is_told_of_changes_by_the_head(
    cluster: FakeCluster, chat: runner_pb2.Instance
) -> None:
    live = cluster.nodes["ada"].runner.live
    assert live is not None
    async with cluster.running("top", "--json") as process:
        assert (await next_instance(process))["load"]["completion_tokens_per_second"] == 10
        # The first look is of all nodes; what comes next is from the stream.
        live.put_nowait(at_work(cluster, 20.0))
        told = await next_instance(process)
        assert told["load"]["completion_tokens_per_second"] == 20
        assert told["shards"][1]["usage"]["busy_fraction"] == 0.5
        process.send_signal(signal.SIGINT)
        run = await ended(process)
    assert (run.code, run.err.strip()) == (130, "")


async def test_top_off_a_terminal_prints_one_picture_after_the_other(
    cluster: FakeCluster, chat: runner_pb2.Instance
) -> None:
    live = cluster.nodes["ada"].runner.live
    assert live is not None
    async with cluster.running("top") as process:
        assert await next_line(process) == "1 instance, 10.0 tokens/s, 2 running, 0 queued\n"
        live.put_nowait(at_work(cluster, 20.0))
        while not (line := await next_line(process)).startswith("1 instance, 20.0"):
            assert line, "the command ended"
        process.send_signal(signal.SIGTERM)
        assert (await ended(process)).code == 143


async def test_top_tells_of_a_head_that_stays_silent_and_of_what_became_of_it(
    cluster: FakeCluster, chat: runner_pb2.Instance
) -> None:
    async with cluster.running("top", "--json") as process:
        await next_instance(process)
        await cluster.nodes["ada"].server.stop()
        seen = cluster.nodes["bob"].runner.instances["chat"]
        seen.state = runner_pb2.INSTANCE_STATE_FAILED
        seen.error.reason, seen.error.message = "NODE_LOST", "Node ada is lost."
        while (told := await next_instance(process))["state"] != "INSTANCE_STATE_FAILED":
            assert told["instance_id"] == "chat"
        assert told["error"]["reason"] == "NODE_LOST"


async def test_logs_of_every_rank_by_its_own_node(
    cluster: FakeCluster, chat: runner_pb2.Instance
) -> None:
    chat.shards[0].log_lines[:] = ["INFO loaded", "[bold]INFO[/] ready"]
    # What a node says of another's rank is older than what that one says itself.
    chat.shards[1].log_lines[:] = ["stale"]
    cluster.nodes["bob"].runner.instances["chat"].shards[1].log_lines[:] = ["killed?"]
    run = await cluster.run("logs", "chat")
    assert (run.code, run.err) == (0, "")
    assert run.out.splitlines() == [
        "rank 0 ada | INFO loaded",
        "rank 0 ada | [bold]INFO[/] ready",
        "rank 1 bob | killed?",
    ]
    one = await cluster.run("logs", "chat", "--rank", "1", "--json")
    (shard,) = one.document["shards"]
    assert (shard["rank"], shard["log_lines"]) == (1, ["killed?"])


async def test_logs_of_a_rank_whose_node_is_gone_come_from_another(
    cluster: FakeCluster, chat: runner_pb2.Instance
) -> None:
    chat.shards[1].log_lines[:] = ["last words"]
    await cluster.nodes["bob"].server.stop()
    run = await cluster.run("logs", "chat")
    assert run.out == "rank 1 bob | last words\n"
    assert "Node bob was not asked" in run.err


async def test_logs_of_processes_that_wrote_none(
    cluster: FakeCluster, chat: runner_pb2.Instance
) -> None:
    run = await cluster.run("logs", "chat")
    assert (run.code, run.out, run.err) == (0, "", "Nothing was logged.\n")


async def test_logs_of_a_rank_or_an_instance_that_there_is_not(
    cluster: FakeCluster, chat: runner_pb2.Instance
) -> None:
    run = await cluster.run("logs", "chat", "--rank", "2", "--json")
    assert (run.code, run.error["reason"]) == (1, "INVALID_FIELD")
    run = await cluster.run("logs", "nope", "--json")
    assert (run.code, run.error["reason"]) == (1, "INSTANCE_NOT_FOUND")
