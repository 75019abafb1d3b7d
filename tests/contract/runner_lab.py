"""Runners served in this process, with real children in a real MLX ring.

Only the downloads service is stood in for: the files are on disk already.
"""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import psutil
import pytest

from services.common.addresses import HostPort
from services.common.channel import Remote
from services.common.errors import Reason, ShardringError
from services.common.server import Server, start_server
from services.runner.app import Runner
from services.runner.bootstrap import registrations
from services.runner.supervisor import FileSource
from shardring.common.v1 import common_pb2
from shardring.placement.v1 import placement_pb2
from shardring.runner.v1 import instance_service_pb2 as pb
from shardring.runner.v1 import instance_service_pb2_grpc, runner_pb2, shard_service_pb2_grpc
from tests.fakes.files_on_disk import MODEL, FilesOnDisk
from tests.processes import children_with

FACTS = [(f["question"], f["answer"]) for f in json.loads((MODEL / "facts.json").read_text())]
LAYERS = 8


@dataclass
class Node:
    """One runner and its server."""

    node_id: str
    runner: Runner
    server: Server
    remote: Remote

    @property
    def instances(self) -> "instance_service_pb2_grpc.InstanceServiceAsyncStub":
        return instance_service_pb2_grpc.InstanceServiceStub(self.remote.channel)

    @property
    def shards(self) -> "shard_service_pb2_grpc.ShardServiceAsyncStub":
        return shard_service_pb2_grpc.ShardServiceStub(self.remote.channel)

    async def start(
        self, instance_id: str, placement: placement_pb2.Placement
    ) -> runner_pb2.Instance:
        request = pb.StartInstanceRequest(instance_id=instance_id, placement=placement)
        answer = await self.remote.unary(self.instances.StartInstance, request, timeout=10)
        return answer.instance

    async def get(self, instance_id: str) -> runner_pb2.Instance:
        request = pb.GetInstanceRequest(instance_id=instance_id)
        return (await self.remote.unary(self.instances.GetInstance, request, timeout=5)).instance

    async def until(self, instance_id: str, *states: int) -> runner_pb2.Instance:
        """Return the instance once it is in one of these states."""
        request = pb.WatchInstanceRequest(instance_id=instance_id)
        watch = self.remote.stream(self.instances.WatchInstance, request, timeout=60)
        async for message in watch:
            if message.instance.state in states:
                return message.instance
        raise AssertionError(f"{instance_id} ended otherwise: {message.instance}")

    async def ready(self, instance_id: str, placement: placement_pb2.Placement) -> None:
        await self.start(instance_id, placement)
        await self.until(instance_id, runner_pb2.INSTANCE_STATE_READY)

    async def stop(self, instance_id: str) -> None:
        request = pb.StopInstanceRequest(instance_id=instance_id)
        await self.remote.unary(self.instances.StopInstance, request, timeout=15)

    async def generate(self, instance_id: str, **fields: object) -> list[pb.GenerateResponse]:
        """Return all messages of one generation."""
        request = pb.GenerateRequest(instance_id=instance_id, **fields)  # type: ignore[arg-type]
        stream = self.remote.stream(self.instances.Generate, request, timeout=60)
        return [message async for message in stream]

    async def answer(self, instance_id: str, question: str) -> str:
        messages = await self.generate(instance_id, input=ask(question))
        return "".join(message.text for message in messages)


def ask(question: str) -> runner_pb2.GenerationInput:
    turn = runner_pb2.ChatMessage(role="user", content=question)
    return runner_pb2.GenerationInput(messages=runner_pb2.ChatMessages(messages=[turn]))


def text(prompt: str) -> runner_pb2.GenerationInput:
    return runner_pb2.GenerationInput(prompt=prompt)


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def place(nodes: list[Node], cuts: list[int]) -> placement_pb2.Placement:
    """Return a placement of the model on these nodes, cut at these layers."""
    n = len(nodes)
    ports = free_ports(n)
    bounds = [0, *cuts, LAYERS]

    def host(rank: int, i: int) -> str:
        if i == rank:
            return f"0.0.0.0:{ports[i]}"
        near = i in ((rank - 1) % n, (rank + 1) % n)
        return f"127.0.0.1:{ports[i]}" if near else "198.51.100.1:0"

    return placement_pb2.Placement(
        model_id="shardring/tiny-facts",
        commit="0" * 40,
        layer_count=LAYERS,
        ranks=[
            placement_pb2.RankAssignment(
                rank=rank,
                node_id=node.node_id,
                node_name=node.node_id,
                endpoints=[common_pb2.Endpoint(address="127.0.0.1", port=node.server.port)],
                layers=common_pb2.LayerRange(start=bounds[rank], end=bounds[rank + 1]),
                hosts=[] if n == 1 else [host(rank, i) for i in range(n)],
                weight_bytes=1000,
            )
            for rank, node in enumerate(nodes)
        ],
    )


async def start_node(node_id: str, files: FileSource | None = None) -> Node:
    runner = Runner(node_id, files or FilesOnDisk())
    server = await start_server(HostPort("127.0.0.1", 0), registrations(runner))
    return Node(node_id, runner, server, Remote(node_id, [HostPort("127.0.0.1", server.port)]))


@asynccontextmanager
async def three_nodes(*files: FileSource) -> AsyncIterator[list[Node]]:
    """Three nodes; in the end no child of theirs may be left. `files`: of all, or of each."""
    given = files if len(files) == 3 else (files or (FilesOnDisk(),)) * 3
    letters = zip("abc", given, strict=True)
    started = [await start_node(f"node-{letter}", source) for letter, source in letters]
    yield started
    for node in started:
        await node.runner.close("is stopping")
    for node in started:
        await node.remote.close()
        await node.server.stop()
    assert children() == {}


def children(instance_id: str = "") -> dict[int, psutil.Process]:
    """Return the child process of each rank of an instance, or of all."""
    found = {}
    for process in children_with("services.runner.child"):
        with suppress(psutil.NoSuchProcess):
            words = process.cmdline()
            if instance_id in ("", words[words.index("--instance") + 1]):
                found[int(words[words.index("--rank") + 1])] = process
    return found


async def eventually(condition: Callable[[], bool]) -> None:
    """Return once the condition holds; fail when it does not within 60 s."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.02)


def refused(error: pytest.ExceptionInfo[ShardringError], reason: Reason) -> dict[str, str]:
    assert error.value.reason is reason, error.value
    return error.value.metadata
