"""What is left of requests that were given up, and of instances that came and went: nothing."""

import asyncio
import gc
import random
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import grpc
import psutil
import pytest
import pytest_asyncio

from services.common.errors import ShardringError
from services.runner.adapters.child import start_child
from services.runner.adapters.sibling import RemoteSibling
from services.runner.supervisor import ShardSupervisor
from shardring.runner.v1 import instance_service_pb2 as pb
from shardring.runner.v1 import runner_pb2
from tests.contract.runner_lab import (
    FACTS,
    Node,
    children,
    eventually,
    free_ports,
    place,
    text,
    three_nodes,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

READY, STOPPED, FAILED = (
    runner_pb2.INSTANCE_STATE_READY,
    runner_pb2.INSTANCE_STATE_STOPPED,
    runner_pb2.INSTANCE_STATE_FAILED,
)
WARM_ROUNDS, ROUNDS = 2, 8


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def nodes() -> AsyncIterator[list[Node]]:
    async with three_nodes() as started:
        yield started


def alive(kind: type[ShardSupervisor | RemoteSibling]) -> int:
    """Count the objects of a type that belong to "round" and that anything still refers to."""
    gc.collect()
    found = [each for each in gc.get_objects() if type(each) is kind]
    return sum(each.instance_id == "round" for each in found)


async def ask_and_leave(head: Node, chance: random.Random) -> None:
    """Leave in the queue, in the prompt, or while tokens come; by cancelling or a deadline."""
    request = pb.GenerateRequest(
        instance_id="left",
        input=text("Go on " * chance.choice((2, 100))),
        sampling=runner_pb2.Sampling(temperature=5, seed=chance.randrange(2**31)),
        stop=runner_pb2.StopConditions(ignore_end_tokens=True),
        choice_count=chance.choice((1, 1, 3)),
    )
    seconds = chance.random() ** 2 * 0.5
    call = head.instances.Generate(request, timeout=seconds if chance.random() < 0.3 else 30)
    leaving = asyncio.get_running_loop().call_later(seconds, call.cancel)
    # However it ends: what counts is what is left of it.
    with suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
        async for _ in call:
            if chance.random() < 0.05:
                break
    leaving.cancel()
    call.cancel()


async def test_hundreds_of_requests_given_up_leave_nothing(nodes: list[Node]) -> None:
    head = nodes[0]
    await head.ready("left", place(nodes, [2, 4]))
    chance = random.Random(4)

    async def many(count: int) -> None:
        # Fewer at once than the queue holds, so that all of them begin.
        for _ in range(count // 40):
            await asyncio.gather(*(ask_and_leave(head, chance) for _ in range(40)))

    async def idle() -> None:
        async with asyncio.timeout(30):
            while (instance := await head.get("left")).request_count or any(
                shard.usage.cache_bytes for shard in instance.shards
            ):
                await asyncio.sleep(0.05)
        await eventually(lambda: not any(node.runner.generating() for node in nodes))

    def counts() -> tuple[list[int], list[int]]:
        processes = list(children("left").values())
        return [p.num_fds() for p in processes], [p.num_threads() for p in processes]

    await many(80)
    await idle()
    before = counts()
    question, answer = FACTS[3]
    [_, *answers] = await asyncio.gather(
        many(320), *(head.answer("left", question) for _ in range(3))
    )
    assert answers == [answer] * 3
    await idle()
    assert counts() == before
    instance = head.runner._instances["left"]
    requests = instance.requests
    held = (requests._choices, requests._calls, requests._preparing, requests._to_come)
    assert not any(held)
    assert not requests._shard._requests_at_work
    await head.stop("left")
    # Not even what watched its progress.
    await eventually(lambda: not requests._tasks)


@pytest.mark.timeout(300)
async def test_rounds_leave_nothing(
    nodes: list[Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    process = psutil.Process()
    pair = nodes[:2]

    def counts() -> dict[str, int]:
        return {
            "descriptors": process.num_fds(),
            "threads": process.num_threads(),
            "tasks": len(asyncio.all_tasks()),
            "supervisors": alive(ShardSupervisor),
            "siblings": alive(RemoteSibling),
            "files": len(list(tmp_path.rglob("*"))),
            "children": len(children()),
        }

    async def play(number: int) -> None:
        question, answer = FACTS[number]
        await pair[0].ready("round", place(pair, [4]))
        assert await pair[0].answer("round", question) == answer
        await pair[number % 2].stop("round")

    for number in range(WARM_ROUNDS):
        await play(number)
    # Connections to siblings end a moment after the instance.
    await eventually(lambda: alive(RemoteSibling) == 0)
    before = counts()
    for number in range(ROUNDS):
        await play(number)
    await eventually(lambda: all(now <= before[name] for name, now in counts().items()))


async def test_stops_at_once_and_again_are_quiet(nodes: list[Node]) -> None:
    await nodes[0].ready("stopped", place(nodes, [2, 4]))
    await asyncio.gather(*(node.stop("stopped") for node in nodes * 3))
    assert children("stopped") == {}
    for node in nodes:
        instance = await node.until("stopped", STOPPED)
        assert not instance.HasField("error")
        await node.stop("stopped")
        assert (await node.get("stopped")).state == STOPPED


async def test_stopping_while_it_fails_is_quiet_and_complete(nodes: list[Node]) -> None:
    await nodes[0].ready("failing", place(nodes, [2, 4]))
    children("failing")[1].send_signal(signal.SIGKILL)
    await asyncio.gather(*(node.stop("failing") for node in nodes * 2))
    assert children("failing") == {}
    for node in nodes:
        await node.until("failing", STOPPED, FAILED)
        await node.stop("failing")


async def test_starts_and_stops_at_once_end_in_order(nodes: list[Node]) -> None:
    placement = place(nodes, [2, 4])

    async def start() -> None:
        with suppress(ShardringError):
            await nodes[0].start("torn", placement)

    async def stop(node: Node) -> None:
        with suppress(ShardringError):  # this node has not heard of it yet
            await node.stop("torn")

    for _ in range(2):
        await asyncio.gather(start(), *(stop(node) for node in nodes), start())
    # Whichever came last: it can be stopped, and started anew.
    await stop(nodes[0])
    await eventually(lambda: children("torn") == {})
    await nodes[0].ready("torn", placement)
    await nodes[0].stop("torn")


# The child waits for a neighbour that never comes, deaf to all but the end of its parent.
PARENT = """
import asyncio, sys
from services.runner.adapters.child import start_child
from services.runner.child_protocol import Connect

async def main():
    child = await start_child("orphan", 0, "node", {})
    child.send(Connect(0, tuple(sys.argv[1:])))
    print(child.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.parametrize(
    "stopped",
    [
        False,
        pytest.param(
            True,
            marks=pytest.mark.skipif(
                sys.platform != "linux", reason="only Linux kills what is stopped with its parent"
            ),
        ),
    ],
)
async def test_a_child_dies_with_its_parent(stopped: bool) -> None:
    hosts = [f"127.0.0.1:{port}" for port in free_ports(2)]
    parent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PARENT, *hosts), stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    child = psutil.Process(int(await parent.stdout.readline()))
    try:
        await eventually(lambda: any(c.status == "LISTEN" for c in child.net_connections("tcp")))
        if stopped:
            child.send_signal(signal.SIGSTOP)
        parent.kill()
        await parent.wait()
        await eventually(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
    finally:
        with suppress(psutil.NoSuchProcess):
            child.kill()


async def test_a_child_ends_with_its_connection() -> None:
    """As where nothing kills processes with their parents."""
    child = await start_child("alone", 0, "node", {})
    try:
        child._writer.close()
        assert await child._process.wait() == 0
    finally:
        await child.kill()
