"""A cluster that says what a test wants, and the real `shardring` command run against it.

The servers are Shardring's own, so errors travel as they really do; only what is behind them is
made up.
"""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from services.common.addresses import HostPort
from services.common.errors import Reason, ShardringError
from services.common.server import Registration, Server, start_server
from shardring.common.v1 import common_pb2
from shardring.downloads.v1 import downloads_pb2, downloads_service_pb2, downloads_service_pb2_grpc
from shardring.placement.v1 import placement_pb2, placement_service_pb2, placement_service_pb2_grpc
from shardring.runner.v1 import instance_service_pb2, instance_service_pb2_grpc, runner_pb2
from shardring.topology.v1 import topology_pb2, topology_service_pb2, topology_service_pb2_grpc

LOOPBACK = HostPort("127.0.0.1", 0)
MODEL = "org/model"


def raised(error: ShardringError | None) -> None:
    if error is not None:
        raise error


class FakeTopology(topology_service_pb2_grpc.TopologyServiceServicer):
    def __init__(self) -> None:
        self.topology = topology_pb2.Topology()
        self.changed: asyncio.Queue[None] = asyncio.Queue()

    async def GetTopology(
        self, request: topology_service_pb2.GetTopologyRequest, context: object
    ) -> topology_service_pb2.GetTopologyResponse:
        return topology_service_pb2.GetTopologyResponse(revision=1, topology=self.topology)

    async def WatchTopology(
        self, request: topology_service_pb2.WatchTopologyRequest, context: object
    ) -> AsyncIterator[topology_service_pb2.WatchTopologyResponse]:
        yield topology_service_pb2.WatchTopologyResponse(revision=1, snapshot=self.topology)
        while True:
            await self.changed.get()
            yield topology_service_pb2.WatchTopologyResponse(
                change=topology_service_pb2.TopologyChange()
            )


class FakePlacement(placement_service_pb2_grpc.PlacementServiceServicer):
    def __init__(self) -> None:
        self.placement = placement_pb2.Placement()
        self.previews: list[placement_service_pb2.Preview] = []
        self.error: ShardringError | None = None
        self.requests: list[placement_service_pb2.PlaceRequest] = []
        self.preview_requests: list[placement_service_pb2.PreviewPlacementsRequest] = []

    async def Place(
        self, request: placement_service_pb2.PlaceRequest, context: object
    ) -> placement_service_pb2.PlaceResponse:
        self.requests.append(request)
        raised(self.error)
        return placement_service_pb2.PlaceResponse(placement=self.placement)

    async def PreviewPlacements(
        self, request: placement_service_pb2.PreviewPlacementsRequest, context: object
    ) -> placement_service_pb2.PreviewPlacementsResponse:
        self.preview_requests.append(request)
        return placement_service_pb2.PreviewPlacementsResponse(previews=self.previews)


class FakeDownloads(downloads_service_pb2_grpc.DownloadsServiceServicer):
    """Downloads run as `steps` says: node id -> the states each goes through."""

    def __init__(self) -> None:
        self.steps: dict[str, list[downloads_pb2.Download]] = {}
        self.earlier: list[downloads_pb2.Download] = []
        self.models: list[downloads_service_pb2.ModelOnNodes] = []
        self.started: list[str] = []
        self.cancelled: list[str] = []
        self.watched = asyncio.Event()
        self.disks: list[downloads_service_pb2.NodeDisk] = []
        self.facts: downloads_pb2.Model | None = None
        # What a verification, or a removal, on a node gives; by its id.
        self.verifications: dict[str, list[downloads_service_pb2.Verification]] = {}
        self.freed: dict[str, int | ShardringError] = {}
        self.verifying = asyncio.Event()
        self.verify_cancelled = asyncio.Event()

    async def ListModels(
        self, request: downloads_service_pb2.ListModelsRequest, context: object
    ) -> downloads_service_pb2.ListModelsResponse:
        # One a page, so that a client that reads but one page is found out.
        index = int(request.page_token or 0)
        following = str(index + 1) if index + 1 < len(self.models) else ""
        return downloads_service_pb2.ListModelsResponse(
            models=self.models[index : index + 1], next_page_token=following, disks=self.disks
        )

    async def GetModel(
        self, request: downloads_service_pb2.GetModelRequest, context: object
    ) -> downloads_service_pb2.GetModelResponse:
        if self.facts is None:
            raise ShardringError(Reason.MODEL_NOT_FOUND, f"The hub has no {request.model_id}.")
        return downloads_service_pb2.GetModelResponse(model=self.facts)

    async def VerifyModel(
        self, request: downloads_service_pb2.VerifyModelRequest, context: object
    ) -> AsyncIterator[downloads_service_pb2.VerifyModelResponse]:
        """Ends when the last step says so; else it stays silent for ever."""
        if (steps := self.verifications.get(request.node_id)) is None:
            raise ShardringError(Reason.MODEL_IN_USE, "It is being downloaded.")
        try:
            for step in steps:
                yield downloads_service_pb2.VerifyModelResponse(verification=step)
            self.verifying.set()
            if not (steps and steps[-1].done):
                await asyncio.Event().wait()
        except (asyncio.CancelledError, GeneratorExit):
            self.verify_cancelled.set()
            raise

    async def DeleteModel(
        self, request: downloads_service_pb2.DeleteModelRequest, context: object
    ) -> downloads_service_pb2.DeleteModelResponse:
        freed = self.freed[request.node_id]
        if isinstance(freed, ShardringError):
            raise freed
        return downloads_service_pb2.DeleteModelResponse(freed_bytes=freed)

    async def ListDownloads(
        self, request: downloads_service_pb2.ListDownloadsRequest, context: object
    ) -> downloads_service_pb2.ListDownloadsResponse:
        return downloads_service_pb2.ListDownloadsResponse(downloads=self.earlier)

    async def StartDownload(
        self, request: downloads_service_pb2.StartDownloadRequest, context: object
    ) -> downloads_service_pb2.StartDownloadResponse:
        if request.node_id not in self.steps:
            raise ShardringError(Reason.WORKER_NOT_ATTACHED, "No worker is attached there.")
        self.started.append(request.node_id)
        return downloads_service_pb2.StartDownloadResponse(download=self.steps[request.node_id][0])

    async def WatchDownloads(
        self, request: downloads_service_pb2.WatchDownloadsRequest, context: object
    ) -> AsyncIterator[downloads_service_pb2.WatchDownloadsResponse]:
        assert list(request.download_ids), "no ids would mean all"
        self.watched.set()
        for steps in self.steps.values():
            for step in steps[1:]:
                yield downloads_service_pb2.WatchDownloadsResponse(downloads=[step])
        await asyncio.Event().wait()

    async def CancelDownload(
        self, request: downloads_service_pb2.CancelDownloadRequest, context: object
    ) -> downloads_service_pb2.CancelDownloadResponse:
        self.cancelled.append(request.download_id)
        return downloads_service_pb2.CancelDownloadResponse()


class FakeRunner(instance_service_pb2_grpc.InstanceServiceServicer):
    """A node's runner. `changes`: what a watch tells; with `hangs` it then stays silent."""

    def __init__(self) -> None:
        self.instances: dict[str, runner_pb2.Instance] = {}
        self.start_errors: list[ShardringError] = []
        self.changes: list[runner_pb2.Instance] = []
        self.hangs = False
        # Where set, a watch goes on with what is put here.
        self.live: asyncio.Queue[runner_pb2.Instance] | None = None
        self.parts: list[instance_service_pb2.GenerateResponse] = []
        self.generate_error: ShardringError | None = None
        self.asked: list[instance_service_pb2.GenerateRequest] = []
        self.generating = asyncio.Event()
        self.generate_cancelled = asyncio.Event()
        self.started: list[str] = []
        self.options = runner_pb2.InstanceOptions()
        self.watching = asyncio.Event()
        self.stopped: list[str] = []

    async def StartInstance(
        self, request: instance_service_pb2.StartInstanceRequest, context: object
    ) -> instance_service_pb2.StartInstanceResponse:
        if self.start_errors:
            raise self.start_errors.pop(0)
        self.started.append(request.instance_id)
        self.options = request.options
        return instance_service_pb2.StartInstanceResponse()

    async def ListInstances(
        self, request: instance_service_pb2.ListInstancesRequest, context: object
    ) -> instance_service_pb2.ListInstancesResponse:
        return instance_service_pb2.ListInstancesResponse(instances=self.instances.values())

    async def GetInstance(
        self, request: instance_service_pb2.GetInstanceRequest, context: object
    ) -> instance_service_pb2.GetInstanceResponse:
        if request.instance_id not in self.instances:
            raise ShardringError(Reason.INSTANCE_NOT_FOUND, "This node knows no such instance.")
        return instance_service_pb2.GetInstanceResponse(
            instance=self.instances[request.instance_id]
        )

    async def WatchInstance(
        self, request: instance_service_pb2.WatchInstanceRequest, context: object
    ) -> AsyncIterator[instance_service_pb2.WatchInstanceResponse]:
        for change in self.changes:
            change.instance_id = request.instance_id
            yield instance_service_pb2.WatchInstanceResponse(instance=change)
        self.watching.set()
        while self.live is not None:
            change = await self.live.get()
            yield instance_service_pb2.WatchInstanceResponse(instance=change)
        if self.hangs:
            await asyncio.Event().wait()

    async def StopInstance(
        self, request: instance_service_pb2.StopInstanceRequest, context: object
    ) -> instance_service_pb2.StopInstanceResponse:
        self.stopped.append(request.instance_id)
        known = self.instances.get(request.instance_id)
        stopped = runner_pb2.Instance(
            instance_id=request.instance_id,
            placement=known.placement if known else None,
            state=runner_pb2.INSTANCE_STATE_STOPPED,
        )
        return instance_service_pb2.StopInstanceResponse(instance=stopped)

    async def Generate(
        self, request: instance_service_pb2.GenerateRequest, context: object
    ) -> AsyncIterator[instance_service_pb2.GenerateResponse]:
        self.asked.append(request)
        try:
            for part in self.parts:
                yield part
            self.generating.set()
            raised(self.generate_error)
            if not (self.parts and self.parts[-1].HasField("completion")):
                await asyncio.Event().wait()
        except (asyncio.CancelledError, GeneratorExit):
            self.generate_cancelled.set()
            raise


@dataclass
class FakeNode:
    """A node with a runner of its own. Stop its server to make it unreachable."""

    node: topology_pb2.Node
    runner: FakeRunner
    server: Server


@dataclass(frozen=True)
class Ended:
    """How a run of the command ended."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        return json.loads(self.out)

    @property
    def lines(self) -> list[Any]:
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = json.loads(self.err.splitlines()[-1])["error"]
        return error


@dataclass
class FakeCluster:
    """Three services on one port, and nodes on ports of their own."""

    topology: FakeTopology
    placement: FakePlacement
    downloads: FakeDownloads
    address: HostPort
    server: Server
    nodes: dict[str, FakeNode] = field(default_factory=dict)

    async def add_node(self, name: str) -> FakeNode:
        runner = FakeRunner()
        server = await start_server(
            LOOPBACK,
            [
                Registration(
                    "shardring.runner.v1.InstanceService",
                    lambda s: instance_service_pb2_grpc.add_InstanceServiceServicer_to_server(
                        runner, s
                    ),
                )
            ],
        )
        node = topology_pb2.Node(
            node_id=f"id-{name}-0123456789abcdef",
            name=name,
            endpoints=[common_pb2.Endpoint(address="127.0.0.1", port=server.port)],
            memory_total_bytes=16_000_000_000,
            memory_available_bytes=8_000_000_000,
            backends=[common_pb2.BACKEND_CPU],
        )
        node.last_report_time.GetCurrentTime()
        self.topology.topology.nodes.append(node)
        self.nodes[name] = FakeNode(node, runner, server)
        return self.nodes[name]

    def ring(self, *names: str) -> placement_pb2.Placement:
        """Return a placement of four layers a node; the first is the head."""
        count = len(names)
        return placement_pb2.Placement(
            model_id=MODEL,
            commit="c0ffee",
            layer_count=4 * count,
            ranks=[
                placement_pb2.RankAssignment(
                    rank=rank,
                    node_id=self.nodes[name].node.node_id,
                    node_name=name,
                    endpoints=self.nodes[name].node.endpoints,
                    layers=common_pb2.LayerRange(start=4 * rank, end=4 * rank + 4),
                    hosts=[f"10.0.0.{i}:6000" for i in range(count)] if count > 1 else [],
                    weight_bytes=2_000_000_000,
                    memory_available_bytes=8_000_000_000,
                    backend=common_pb2.BACKEND_CPU,
                )
                for rank, name in enumerate(names)
            ],
            score=placement_pb2.PlacementScore(node_count=count, proven_optimal=True),
        )

    @property
    def environment(self) -> dict[str, str]:
        ours = {
            f"SHARDRING_{name}": str(self.address)
            for name in ("TOPOLOGY", "PLACEMENT", "DOWNLOADS")
        }
        return {**os.environ, **ours}

    @asynccontextmanager
    async def running(self, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
        """Run `shardring ARGUMENTS`; kill it in the end if it is still there."""
        async with command(arguments, self.environment) as process:
            yield process

    async def run(self, *arguments: str) -> Ended:
        async with self.running(*arguments) as process:
            return await ended(process)


@asynccontextmanager
async def command(
    arguments: Sequence[str], environment: dict[str, str]
) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "services.cli", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def ended(process: asyncio.subprocess.Process) -> Ended:
    async with asyncio.timeout(60):
        out, err = await process.communicate()
    assert process.returncode is not None
    return Ended(process.returncode, out.decode(), err.decode())


def instance_of(
    placement: placement_pb2.Placement,
    state: runner_pb2.InstanceState.ValueType,
    shard_state: runner_pb2.ShardState.ValueType,
    *,
    instance_id: str = "chat",
    rank: int = 0,
) -> runner_pb2.Instance:
    """Return an instance all of whose shards are in one state, as `rank` sees it."""
    instance = runner_pb2.Instance(
        instance_id=instance_id,
        placement=placement,
        state=state,
        rank=rank,
        has_chat_template=rank == 0,
        shards=[
            runner_pb2.Shard(
                instance_id=instance_id,
                rank=assigned.rank,
                node_id=assigned.node_id,
                layers=assigned.layers,
                state=shard_state,
                memory_bytes=1_000_000,
                download_fraction=1.0,
            )
            for assigned in placement.ranks
        ],
    )
    instance.create_time.GetCurrentTime()
    return instance


def ready(
    placement: placement_pb2.Placement, *, instance_id: str = "chat", rank: int = 0
) -> runner_pb2.Instance:
    return instance_of(
        placement,
        runner_pb2.INSTANCE_STATE_READY,
        runner_pb2.SHARD_STATE_READY,
        instance_id=instance_id,
        rank=rank,
    )


def answer(*texts: str) -> list[instance_service_pb2.GenerateResponse]:
    """Return the parts of a generation that has come to its end."""
    completion = runner_pb2.Completion(
        finish_reason=runner_pb2.FINISH_REASON_STOP,
        prompt_token_count=5,
        completion_token_count=len(texts),
    )
    completion.decode_duration.FromMilliseconds(100 * len(texts))
    completion.prompt_duration.FromMilliseconds(20)
    parts = [
        instance_service_pb2.GenerateResponse(text=text, token_ids=[index])
        for index, text in enumerate(texts)
    ]
    return [*parts, instance_service_pb2.GenerateResponse(completion=completion)]


@asynccontextmanager
async def fake_cluster(*names: str) -> AsyncIterator[FakeCluster]:
    """Run a cluster with these nodes."""
    # The calls that the command never makes are left out.
    topology = FakeTopology()  # type: ignore[abstract]
    placement = FakePlacement()
    downloads = FakeDownloads()  # type: ignore[abstract]

    def add(server: grpc.aio.Server) -> None:
        topology_service_pb2_grpc.add_TopologyServiceServicer_to_server(topology, server)
        placement_service_pb2_grpc.add_PlacementServiceServicer_to_server(placement, server)
        downloads_service_pb2_grpc.add_DownloadsServiceServicer_to_server(downloads, server)

    server = await start_server(
        LOOPBACK, [Registration("shardring.topology.v1.TopologyService", add)]
    )
    address = HostPort("127.0.0.1", server.port)
    cluster = FakeCluster(topology, placement, downloads, address, server)
    try:
        for name in names:
            await cluster.add_node(name)
        if names:
            placement.placement = cluster.ring(*names)
        yield cluster
    finally:
        servers = [server, *(node.server for node in cluster.nodes.values())]
        await asyncio.gather(*(one.stop() for one in servers))
