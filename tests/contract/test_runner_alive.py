"""What a runner does when things die, stop, hang, come twice or go away half-way."""

import asyncio
import random
import signal
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from services.common.errors import Reason, ShardringError
from services.runner.requests import QUEUE_LIMIT
from shardring.placement.v1 import placement_pb2
from shardring.runner.v1 import instance_service_pb2 as pb
from shardring.runner.v1 import runner_pb2, shard_service_pb2
from tests.contract.runner_lab import (
    FACTS,
    Node,
    children,
    eventually,
    place,
    refused,
    start_node,
    text,
    three_nodes,
)
from tests.fakes.files_on_disk import MODEL, FilesOnDisk
from tests.processes import children_with

pytestmark = pytest.mark.asyncio(loop_scope="module")

READY, STOPPED, FAILED = (
    runner_pb2.INSTANCE_STATE_READY,
    runner_pb2.INSTANCE_STATE_STOPPED,
    runner_pb2.INSTANCE_STATE_FAILED,
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def nodes() -> AsyncIterator[list[Node]]:
    async with three_nodes() as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def head(nodes: list[Node]) -> Node:
    """The head of "ring", which serves on all three."""
    await nodes[0].ready("ring", place(nodes, [2, 4]))
    return nodes[0]


def endless(instance_id: str, seed: int = 3) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        instance_id=instance_id,
        input=text("Go on and on:"),
        sampling=runner_pb2.Sampling(temperature=5, seed=seed),
    )


async def until_state(node: Node, instance_id: str, state: int) -> None:
    """Return once the node's own shard has come this far."""
    request = pb.WatchInstanceRequest(instance_id=instance_id)
    async for message in node.remote.stream(node.instances.WatchInstance, request, timeout=60):
        if message.instance.shards[message.instance.rank].state >= state:
            return


async def until_count(node: Node, count: int) -> None:
    """Return once "ring" has so many requests."""
    async with asyncio.timeout(10):
        while (await node.get("ring")).request_count != count:
            await asyncio.sleep(0.01)


async def test_many_cancelled_requests_leave_nothing(head: Node) -> None:
    chance = random.Random(1)

    async def ask_and_leave(seed: int) -> None:
        call = head.instances.Generate(endless("ring", seed))
        leaving = asyncio.get_running_loop().call_later(chance.random() * 0.3, call.cancel)
        with pytest.raises(asyncio.CancelledError):
            async for _ in call:
                pass
        leaving.cancel()

    for first in range(0, 120, 40):
        await asyncio.gather(*(ask_and_leave(seed) for seed in range(first, first + 40)))
    question, answer = FACTS[3]
    assert await head.answer("ring", question) == answer
    await until_count(head, 0)


async def test_a_client_that_leaves_the_queue_leaves_room(head: Node) -> None:
    running = head.remote.stream(head.instances.Generate, endless("ring"))
    await anext(running)
    waiting = [head.instances.Generate(endless("ring", seed)) for seed in range(QUEUE_LIMIT - 1)]
    await until_count(head, QUEUE_LIMIT)
    with pytest.raises(ShardringError) as refusal:
        await head.generate("ring", input=text("hi"))
    refused(refusal, Reason.QUEUE_FULL)
    for call in waiting:
        call.cancel()
    await until_count(head, 1)
    await anext(running)
    await running.aclose()


async def test_a_stopped_process_fails_the_instance(nodes: list[Node]) -> None:
    await nodes[0].ready("frozen", place(nodes, [2, 4]))
    stream = nodes[0].remote.stream(nodes[0].instances.Generate, endless("frozen"))
    sent = len((await anext(stream)).token_ids)
    children("frozen")[1].send_signal(signal.SIGSTOP)
    with pytest.raises(ShardringError) as failure:
        async for message in stream:
            sent += len(message.token_ids)
    metadata = refused(failure, Reason.INSTANCE_FAILED)
    assert (metadata["rank"], metadata["sent_token_count"]) == ("1", str(sent))
    assert "stopped by a signal" in failure.value.message
    await eventually(lambda: children("frozen") == {})


async def test_it_may_be_started_again_as_soon_as_its_head_failed(nodes: list[Node]) -> None:
    placement = place(nodes, [2, 4])
    await nodes[0].ready("phoenix", placement)
    for _ in range(2):
        children("phoenix")[0].kill()
        await nodes[0].until("phoenix", FAILED)
        await nodes[0].ready("phoenix", placement)
    question, answer = FACTS[4]
    assert await nodes[0].answer("phoenix", question) == answer
    await nodes[0].stop("phoenix")


async def test_two_starts_at_once_are_one(nodes: list[Node]) -> None:
    placement = place(nodes, [2, 4])
    await asyncio.gather(*(nodes[0].start("twin", placement) for _ in range(4)))
    await nodes[0].until("twin", READY)
    assert len(children_with("twin")) == 3
    await nodes[0].stop("twin")


async def test_of_two_placements_at_once_one_is_refused(nodes: list[Node]) -> None:
    results = await asyncio.gather(
        nodes[0].start("rivals", place(nodes, [2, 4])),
        nodes[0].start("rivals", place(nodes, [1, 6])),
        return_exceptions=True,
    )
    [refusal] = [result for result in results if isinstance(result, ShardringError)]
    assert refusal.reason is Reason.INSTANCE_EXISTS
    await nodes[0].until("rivals", READY)
    await nodes[0].stop("rivals")


async def test_a_refused_start_leaves_its_namesake_alone(nodes: list[Node]) -> None:
    await nodes[1].ready("namesake", place([nodes[1]], []))
    with pytest.raises(ShardringError) as refusal:
        await nodes[0].start("namesake", place(nodes[:2], [4]))
    refused(refusal, Reason.INSTANCE_EXISTS)
    question, answer = FACTS[2]
    assert await nodes[1].answer("namesake", question) == answer
    await nodes[1].stop("namesake")


async def test_another_start_is_not_stopped(nodes: list[Node]) -> None:
    await nodes[1].ready("run", place([nodes[1]], []))
    stop = shard_service_pb2.StopShardRequest(instance_id="run", run_id="another")
    await nodes[1].remote.unary(nodes[1].shards.StopShard, stop, timeout=5)
    assert (await nodes[1].get("run")).state == READY
    await nodes[1].stop("run")


async def test_a_caller_that_goes_away_leaves_no_half_started_ring(nodes: list[Node]) -> None:
    request = pb.StartInstanceRequest(instance_id="orphan", placement=place(nodes, [2, 4]))
    call = nodes[0].instances.StartInstance(request)
    known = False
    while not known:
        try:
            await nodes[0].get("orphan")
            known = True
        except ShardringError:
            await asyncio.sleep(0)
    call.cancel()
    await nodes[0].until("orphan", READY)
    await nodes[0].stop("orphan")


@pytest.mark.parametrize("phase", ["CONNECTING", "LOADING", "WARMING_UP", "READY"])
async def test_stopping_a_start_in_any_phase(nodes: list[Node], phase: str) -> None:
    await nodes[0].start("brief", place(nodes, [2, 4]))
    state = runner_pb2.ShardState.Value(f"SHARD_STATE_{phase}")
    await until_state(nodes[1], "brief", state)
    await asyncio.gather(*(node.stop("brief") for node in nodes))
    for node in nodes:
        assert not (await node.until("brief", STOPPED)).HasField("error")
    assert children("brief") == {}


async def test_a_ring_port_of_a_start_on_its_way_is_taken(nodes: list[Node]) -> None:
    placement = place(nodes, [2, 4])
    await nodes[0].start("first", placement)
    with pytest.raises(ShardringError) as refusal:
        await nodes[0].start("second", placement)
    assert refused(refusal, Reason.RING_PORT_IN_USE)["node_id"] == "node-a"
    await nodes[0].stop("first")


async def test_a_rank_that_broke_does_not_wait_for_others_downloads(nodes: list[Node]) -> None:
    class SlowFiles(FilesOnDisk):
        async def fetch(self, *arguments: object) -> Path:
            on_progress = arguments[-1]
            assert callable(on_progress)
            for step in range(1000):
                on_progress(step / 1000)
                await asyncio.sleep(0.1)
            return MODEL

    slow = await start_node("slow", SlowFiles())
    placement = place([nodes[0], slow], [4])
    await nodes[0].start("broken", placement)
    port = int(placement.ranks[0].hosts[0].rpartition(":")[2])
    with socket.create_server(("0.0.0.0", port)):
        instance = await nodes[0].until("broken", FAILED)
    assert instance.error.reason == Reason.SHARD_FAILED
    assert instance.error.metadata["rank"] == "0"
    await slow.runner.close("is stopping")
    await slow.remote.close()
    await slow.server.stop()


async def test_a_stopping_node_starts_nothing() -> None:
    node = await start_node("leaving")
    await node.runner.close("is stopping")
    with pytest.raises(ShardringError) as refusal:
        await node.start("late", place([node], []))
    refused(refusal, Reason.SHUTTING_DOWN)
    assert children("late") == {}
    await node.remote.close()
    await node.server.stop()


@pytest.mark.parametrize(
    ("field", "spoil"),
    [
        ("hosts[1]", lambda p: p.ranks[0].hosts.__setitem__(1, "nowhere")),
        ("hosts[1]", lambda p: p.ranks[0].hosts.__setitem__(1, "node.example:61000")),
        ("hosts[0].port", lambda p: p.ranks[0].hosts.__setitem__(0, "0.0.0.0:0")),
        ("hosts[1]", lambda p: p.ranks[0].hosts.__setitem__(1, "127.0.0.1:99999")),
        ("hosts[1]", lambda p: p.ranks[0].hosts.__setitem__(1, "127.0.0.1:81")),
        ("endpoints[0].port", lambda p: setattr(p.ranks[0].endpoints[0], "port", 99999)),
        ("endpoints[0].port", lambda p: setattr(p.ranks[0].endpoints[0], "port", -1)),
        ("endpoints[0].address", lambda p: setattr(p.ranks[0].endpoints[0], "address", "")),
        ("endpoints[0].address", lambda p: setattr(p.ranks[0].endpoints[0], "address", "a b")),
        ("endpoints[0].address", lambda p: setattr(p.ranks[0].endpoints[0], "address", "a/b")),
        ("weight_bytes", lambda p: setattr(p.ranks[0], "weight_bytes", -1)),
        ("layers", lambda p: setattr(p.ranks[0].layers, "start", -1)),
    ],
)
async def test_a_malformed_placement_is_refused(
    nodes: list[Node], field: str, spoil: Callable[[placement_pb2.Placement], None]
) -> None:
    placement = place(nodes, [2, 4])
    spoil(placement)
    with pytest.raises(ShardringError) as refusal:
        await nodes[0].start("malformed", placement)
    named = refused(refusal, Reason.INVALID_FIELD)["field"]
    assert named == f"placement.ranks[0].{field}"
    with pytest.raises(ShardringError) as refusal:
        await nodes[0].get("malformed")
    refused(refusal, Reason.INSTANCE_NOT_FOUND)


async def test_ports_are_free_in_the_end(nodes: list[Node]) -> None:
    placement = place(nodes, [2, 4])
    await nodes[0].ready("ports", placement)
    await nodes[0].stop("ports")
    for rank in placement.ranks:
        port = int(rank.hosts[rank.rank].rpartition(":")[2])
        socket.create_server(("0.0.0.0", port)).close()
