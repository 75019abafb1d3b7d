"""Runners by themselves, each a process of its own, and one instance on them."""

import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from services.common.addresses import HostPort
from services.common.channel import Remote
from shardring.common.v1 import common_pb2
from shardring.placement.v1 import placement_pb2
from shardring.runner.v1 import instance_service_pb2, runner_pb2
from shardring.runner.v1.instance_service_pb2_grpc import InstanceServiceStub
from tests.benchmarks.serving import module

INSTANCE_ID = "measured"
_READY_SECONDS = 120
_STOP_SECONDS = 15


@dataclass(frozen=True)
class Running:
    """A READY instance: where its head listens, and its runners' processes by rank."""

    port: int
    processes: list[psutil.Process]


@asynccontextmanager
async def running(folder: Path, cuts: list[int], child_module: str) -> AsyncIterator[Running]:
    """Run the model in a folder, its layers cut at `cuts` (0, ..., layer count), a rank a stage.

    Every rank's child runs `child_module`.
    """
    ranks = len(cuts) - 1
    async with AsyncExitStack() as held:
        nodes = [
            await held.enter_async_context(
                module(*("tests.benchmarks.runner_node", f"node-{rank}", child_module, str(folder)))
            )
            for rank in range(ranks)
        ]
        ports = [int(line) for _, line in nodes]
        remote = Remote("the head's runner", [HostPort("127.0.0.1", ports[0])])
        held.push_async_callback(remote.close)
        await _start(remote, _placement(ports, cuts))
        yield Running(ports[0], [psutil.Process(process.pid) for process, _ in nodes])
        # In order: nodes that end with an instance on them say that it failed.
        stub = InstanceServiceStub(remote.channel)
        stop = instance_service_pb2.StopInstanceRequest(instance_id=INSTANCE_ID)
        await remote.unary(stub.StopInstance, stop, timeout=_STOP_SECONDS)


async def _start(remote: Remote, placement: placement_pb2.Placement) -> None:
    stub = InstanceServiceStub(remote.channel)
    start = instance_service_pb2.StartInstanceRequest(instance_id=INSTANCE_ID, placement=placement)
    await remote.unary(stub.StartInstance, start, timeout=30)
    watch = instance_service_pb2.WatchInstanceRequest(instance_id=INSTANCE_ID)
    state = runner_pb2.INSTANCE_STATE_UNSPECIFIED
    async for message in remote.stream(stub.WatchInstance, watch, timeout=_READY_SECONDS):
        if (state := message.instance.state) == runner_pb2.INSTANCE_STATE_READY:
            return
    raise RuntimeError(f"The instance became {runner_pb2.InstanceState.Name(state)}.")


def _placement(ports: list[int], cuts: list[int]) -> placement_pb2.Placement:
    ranks = len(ports)
    hosts = [f"127.0.0.1:{port}" for port in free_ports(ranks)] if ranks > 1 else []
    return placement_pb2.Placement(
        model_id="benchmarks/model",
        commit="0" * 40,
        layer_count=cuts[-1],
        ranks=[
            placement_pb2.RankAssignment(
                rank=rank,
                node_id=f"node-{rank}",
                node_name=f"node-{rank}",
                endpoints=[common_pb2.Endpoint(address="127.0.0.1", port=port)],
                layers=common_pb2.LayerRange(start=cuts[rank], end=cuts[rank + 1]),
                hosts=hosts,
                weight_bytes=1,
            )
            for rank, port in enumerate(ports)
        ],
    )


def free_ports(count: int) -> list[int]:
    """Return ports on loopback that nobody has."""
    with ExitStack() as held:
        ports = []
        for _ in range(count):
            free = held.enter_context(socket.socket())
            free.bind(("127.0.0.1", 0))
            ports.append(free.getsockname()[1])
    return ports
