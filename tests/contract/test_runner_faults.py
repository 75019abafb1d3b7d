"""Any rank may die, stop, starve or be cut off in any phase: all end, and may start again at once.

Every case uses the same ports on the same nodes, so each shows that the one before left nothing.
"""

import asyncio
import resource
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from services.common.errors import Reason, ShardringError
from services.runner.adapters.child import ChildProcess
from services.runner.domain.state import ShardState
from shardring.placement.v1 import placement_pb2
from shardring.runner.v1 import instance_service_pb2 as pb
from shardring.runner.v1 import runner_pb2
from tests.contract.runner_lab import Node, children, eventually, place, refused, text, three_nodes
from tests.fakes.cable import Cable
from tests.fakes.files_on_disk import MODEL, FilesOnDisk

pytestmark = pytest.mark.asyncio(loop_scope="module")

READY, FAILED = runner_pb2.INSTANCE_STATE_READY, runner_pb2.INSTANCE_STATE_FAILED
INSTANCE = "faulty"


class HeldFiles(FilesOnDisk):
    """Files that arrive when they are let go."""

    def __init__(self) -> None:
        self.there = asyncio.Event()
        self.there.set()

    async def fetch(self, *arguments: object) -> Path:
        await self.there.wait()
        return MODEL


@dataclass
class Ring:
    """Three nodes, the files of the last of them, and one placement."""

    nodes: list[Node]
    files: HeldFiles
    placement: placement_pb2.Placement


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ring() -> AsyncIterator[Ring]:
    files = HeldFiles()
    async with three_nodes(FilesOnDisk(), FilesOnDisk(), files) as nodes:
        yield Ring(nodes, files, place(nodes, [2, 4]))


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def _clean(ring: Ring) -> AsyncIterator[None]:
    """Leave nothing to the next test, whatever became of this one."""
    yield
    ring.files.there.set()
    with suppress(ShardringError):
        await ring.nodes[0].stop(INSTANCE)


def endless(prompt: str = "Go on and on:", choices: int = 1) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        instance_id=INSTANCE,
        input=text(prompt),
        sampling=runner_pb2.Sampling(temperature=5, seed=3),
        stop=runner_pb2.StopConditions(ignore_end_tokens=True),
        choice_count=choices,
    )


async def until_phase(node: Node, phase: str) -> None:
    """Return once the node's own shard has come this far; asked directly, so in that moment."""
    async for view in node.runner.watch(INSTANCE):
        if view.shards[view.rank].state >= ShardState[phase]:
            return


async def generate(node: Node, request: pb.GenerateRequest, began: asyncio.Event) -> None:
    """Generate again and again, until a failure, which has to tell how much was sent."""
    sent = 0
    with pytest.raises(ShardringError) as failure:
        while True:
            sent = 0
            async for message in node.remote.stream(node.instances.Generate, request, timeout=60):
                sent += len(message.token_ids)
                began.set()
    told = refused(failure, Reason.INSTANCE_FAILED)
    # A request that came after the failure was never taken.
    assert told.get("sent_token_count", "0") == str(sent)


def kill(process: psutil.Process) -> None:
    process.kill()


def halt(process: psutil.Process) -> None:
    process.send_signal(signal.SIGSTOP)


def starve(process: psutil.Process) -> None:
    """Let the process have no more memory than it has."""
    process.rlimit(resource.RLIMIT_AS, (2**20, process.rlimit(resource.RLIMIT_AS)[1]))


async def end_of(node: Node) -> runner_pb2.Instance:
    """Return the instance once all its ranks have ended, as far as this node knows."""
    request = pb.WatchInstanceRequest(instance_id=INSTANCE)
    watch = node.remote.stream(node.instances.WatchInstance, request, timeout=60)
    return [message.instance async for message in watch][-1]


async def all_failed(ring: Ring, rank: int, phase: str) -> None:
    """Check that every node blames this rank, and that nothing is left of the instance."""
    for node in ring.nodes:
        instance = await end_of(node)
        told = instance.error.metadata
        assert (told["rank"], told["phase"]) == (str(rank), phase), instance.error
        assert all(shard.state == runner_pb2.SHARD_STATE_FAILED for shard in instance.shards)
        assert not any(shard.memory_bytes for shard in instance.shards)
        assert node.runner.reserved_bytes() == 0
    await eventually(lambda: children(INSTANCE) == {})
    for assigned in ring.placement.ranks:
        port = int(assigned.hosts[assigned.rank].rpartition(":")[2])
        socket.create_server(("0.0.0.0", port)).close()


@pytest.fixture
def quick_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.runner.adapters.child._HALT_CHECK_SECONDS", 0.3)


@pytest.mark.parametrize(
    ("rank", "fault"), [(0, kill), (1, halt)], ids=lambda value: getattr(value, "__name__", value)
)
@pytest.mark.usefixtures("quick_watch")
async def test_while_it_connects(
    ring: Ring, rank: int, fault: Callable[[psutil.Process], None]
) -> None:
    # Ranks wait in the ring for the last one, which still downloads.
    ring.files.there.clear()
    await ring.nodes[0].start(INSTANCE, ring.placement)
    for node in ring.nodes[:2]:
        await until_phase(node, "CONNECTING")
    await eventually(lambda: len(children(INSTANCE)) == 2)
    fault(children(INSTANCE)[rank])
    await all_failed(ring, rank, "CONNECTING")


@pytest.mark.parametrize(
    ("phase", "rank", "fault"),
    [("LOADING", 1, kill), ("WARMING_UP", 0, kill), ("WARMING_UP", 2, halt)],
    ids=lambda value: getattr(value, "__name__", value),
)
@pytest.mark.usefixtures("quick_watch")
async def test_while_it_starts(
    ring: Ring, phase: str, rank: int, fault: Callable[[psutil.Process], None]
) -> None:
    await ring.nodes[0].start(INSTANCE, ring.placement)
    await until_phase(ring.nodes[rank], phase)
    fault(children(INSTANCE)[rank])
    instance = await ring.nodes[0].until(INSTANCE, FAILED)
    # It may have gone a step further in the moment between.
    reached = instance.error.metadata["phase"]
    assert ShardState[reached] >= ShardState[phase]
    await all_failed(ring, rank, reached)


@pytest.mark.parametrize(
    ("rank", "fault"),
    [(0, kill), (1, halt)],
    ids=lambda value: getattr(value, "__name__", value),
)
@pytest.mark.usefixtures("quick_watch")
async def test_while_it_is_idle(
    ring: Ring, rank: int, fault: Callable[[psutil.Process], None]
) -> None:
    await ring.nodes[0].ready(INSTANCE, ring.placement)
    fault(children(INSTANCE)[rank])
    await all_failed(ring, rank, "READY")


@pytest.mark.parametrize(
    ("rank", "fault"),
    [(0, halt), (2, kill), (1, starve)],
    ids=lambda value: getattr(value, "__name__", value),
)
@pytest.mark.usefixtures("quick_watch")
async def test_while_it_generates(
    ring: Ring, rank: int, fault: Callable[[psutil.Process], None]
) -> None:
    head = ring.nodes[0]
    await head.ready(INSTANCE, ring.placement)
    # Most of them are in their prompts for a while.
    requests = [endless(), endless("Go on " * 100, choices=4), *[endless("And on " * 120)] * 8]
    began = [asyncio.Event() for _ in requests]
    pairs = zip(requests, began, strict=True)
    asking = [asyncio.create_task(generate(head, *pair)) for pair in pairs]
    await began[0].wait()
    fault(children(INSTANCE)[rank])
    await asyncio.gather(*asking)
    await all_failed(ring, rank, "READY")


@asynccontextmanager
async def cables(ports: list[int]) -> AsyncIterator[list[Cable]]:
    laid = [Cable(port) for port in ports]
    for cable in laid:
        await cable.lay()
    yield laid
    for cable in laid:
        await cable.remove()


@pytest.fixture
def blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looks whether processes are stopped; what is left is to see that nothing moves."""

    async def halted(_: ChildProcess) -> bool:
        await asyncio.Event().wait()
        return True

    monkeypatch.setattr(ChildProcess, "halted", halted)
    monkeypatch.setattr("services.runner.supervisor._LEAST_STALL_SECONDS", 5.0)
    monkeypatch.setattr("services.runner.supervisor._STALL_STEPS", 0)


@pytest.mark.usefixtures("blind")
async def test_a_ring_that_is_stuck_is_found_out(ring: Ring) -> None:
    head = ring.nodes[0]
    await head.ready(INSTANCE, ring.placement)
    began = asyncio.Event()
    asking = asyncio.create_task(generate(head, endless(), began))
    await began.wait()
    halt(children(INSTANCE)[1])
    # Others come, and lose their patience: that is no progress.
    while not asking.done():
        with suppress(ShardringError):
            stream = head.remote.stream(head.instances.Generate, endless(), timeout=0.5)
            [_ async for _ in stream]
    await asking
    for node in ring.nodes:
        told = (await end_of(node)).error
        assert told.reason == Reason.PHASE_TIMEOUT, told
    await eventually(lambda: children(INSTANCE) == {})


@pytest.mark.usefixtures("blind")
async def test_a_ring_that_is_stuck_with_nobody_waiting_is_found_out(ring: Ring) -> None:
    head = ring.nodes[0]
    await head.ready(INSTANCE, ring.placement)
    stream = head.remote.stream(head.instances.Generate, endless())
    await anext(stream)
    halt(children(INSTANCE)[1])
    await stream.aclose()
    assert (await end_of(head)).error.reason == Reason.PHASE_TIMEOUT


async def test_a_network_that_is_cut(ring: Ring) -> None:
    head = ring.nodes[0]
    placement = placement_pb2.Placement()
    placement.CopyFrom(ring.placement)
    async with cables([node.server.port for node in ring.nodes]) as laid:
        for assigned, cable in zip(placement.ranks, laid, strict=True):
            assigned.endpoints[0].port = cable.port
        await head.ready(INSTANCE, placement)
        began = asyncio.Event()
        asking = asyncio.create_task(generate(head, endless(), began))
        await began.wait()
        for cable in laid:
            cable.cut()
        await asking
        for node in ring.nodes:
            told = (await end_of(node)).error
            assert told.reason == Reason.NODE_LOST, told
        await eventually(lambda: children(INSTANCE) == {})
