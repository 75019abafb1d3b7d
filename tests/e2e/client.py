"""Calls to a lab's services, over real gRPC."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from services.cli.lab import Lab
from services.common.addresses import HostPort
from services.common.channel import Remote
from shardring.placement.v1 import placement_pb2, placement_service_pb2
from shardring.placement.v1.placement_service_pb2_grpc import PlacementServiceStub
from shardring.runner.v1 import instance_service_pb2, runner_pb2
from shardring.runner.v1.instance_service_pb2_grpc import InstanceServiceStub
from shardring.topology.v1 import topology_pb2, topology_service_pb2
from shardring.topology.v1.topology_service_pb2_grpc import TopologyServiceStub

if TYPE_CHECKING:
    from shardring.runner.v1.instance_service_pb2_grpc import InstanceServiceAsyncStub

MODEL = "shardring/tiny-facts"


@dataclass
class Client:
    """A client of one lab. Close it in the end."""

    lab: Lab
    remotes: dict[HostPort, Remote] = field(default_factory=dict)

    def remote(self, name: str, address: HostPort | None = None) -> Remote:
        address = address or self.lab.address(name)
        return self.remotes.setdefault(address, Remote(name, [address]))

    async def close(self) -> None:
        for remote in self.remotes.values():
            await remote.close()

    async def topology(self) -> topology_pb2.Topology:
        remote = self.remote("topology")
        call = TopologyServiceStub(remote.channel).GetTopology
        request = topology_service_pb2.GetTopologyRequest()
        return (await remote.unary(call, request, timeout=5)).topology

    async def topology_when(
        self, condition: Callable[[topology_pb2.Topology], bool]
    ) -> topology_pb2.Topology:
        """Return the topology once the condition holds for it, within 30 s."""
        remote = self.remote("topology")
        call = TopologyServiceStub(remote.channel).WatchTopology
        request = topology_service_pb2.WatchTopologyRequest()
        async for _ in remote.stream(call, request, timeout=30):
            topology = await self.topology()
            if condition(topology):
                return topology
        raise AssertionError("the watch ended")

    async def memory_when(self, condition: Callable[[dict[str, int]], bool]) -> dict[str, int]:
        """Return each node's available bytes once the condition holds for them, within 30 s.

        Asked for again and again: small differences make no revision, so no watch tells of them.
        """
        async with asyncio.timeout(30):
            while True:
                nodes = (await self.topology()).nodes
                memory = {node.name: node.memory_available_bytes for node in nodes}
                if condition(memory):
                    return memory
                await asyncio.sleep(0.1)

    async def node_ids(self, *names: str) -> list[str]:
        """Return the ids of nodes, once all of them are linked both ways."""
        links = len(names) * (len(names) - 1)

        def linked(topology: topology_pb2.Topology) -> bool:
            ids = {node.node_id for node in topology.nodes if node.name in names}
            pairs = {
                (link.source_node_id, link.sink_node_id)
                for link in topology.links
                if link.source_node_id in ids and link.sink_node_id in ids
            }
            return len(ids) == len(names) and len(pairs) == links and not topology.gathering

        topology = await self.topology_when(linked)
        by_name = {node.name: node.node_id for node in topology.nodes}
        return [by_name[name] for name in names]

    async def place(self, **fields: object) -> placement_pb2.Placement:
        """Place; `model_id`, `request_id` and `sharding` have defaults, other fields are the
        constraints'."""
        request = placement_service_pb2.PlaceRequest(
            model_id=str(fields.pop("model_id", MODEL)),
            request_id=str(fields.pop("request_id", "e2e")),
            sharding=fields.pop("sharding", None),  # type: ignore[arg-type]
            constraints=placement_service_pb2.PlacementConstraints(**fields),  # type: ignore[arg-type]
        )
        remote = self.remote("placement")
        call = PlacementServiceStub(remote.channel).Place
        return (await remote.unary(call, request, timeout=15)).placement

    def head(self, placement: placement_pb2.Placement) -> "NodeClient":
        endpoint = placement.ranks[0].endpoints[0]
        address = HostPort(endpoint.address, endpoint.port)
        return NodeClient(self.remote(placement.ranks[0].node_name, address))

    def node(self, name: str) -> "NodeClient":
        return NodeClient(self.remote(name))


@dataclass
class NodeClient:
    """The instances of one node."""

    remote: Remote

    @property
    def stub(self) -> "InstanceServiceAsyncStub":
        return InstanceServiceStub(self.remote.channel)

    async def start(self, instance_id: str, placement: placement_pb2.Placement) -> None:
        request = instance_service_pb2.StartInstanceRequest(
            instance_id=instance_id, placement=placement
        )
        await self.remote.unary(self.stub.StartInstance, request, timeout=15)

    async def until(self, instance_id: str, *states: int) -> runner_pb2.Instance:
        """Return the instance once it is in one of these states, within 60 s."""
        request = instance_service_pb2.WatchInstanceRequest(instance_id=instance_id)
        async for message in self.remote.stream(self.stub.WatchInstance, request, timeout=60):
            if message.instance.state in states:
                return message.instance
        raise AssertionError(f"the instance ended otherwise: {message.instance}")

    async def ready(self, instance_id: str, placement: placement_pb2.Placement) -> None:
        await self.start(instance_id, placement)
        await self.until(instance_id, runner_pb2.INSTANCE_STATE_READY)

    async def stop(self, instance_id: str) -> None:
        request = instance_service_pb2.StopInstanceRequest(instance_id=instance_id)
        await self.remote.unary(self.stub.StopInstance, request, timeout=20)

    async def generate(
        self, instance_id: str, question: str, **fields: object
    ) -> AsyncIterator[instance_service_pb2.GenerateResponse]:
        turn = runner_pb2.ChatMessage(role="user", content=question)
        request = instance_service_pb2.GenerateRequest(
            instance_id=instance_id,
            input=runner_pb2.GenerationInput(messages=runner_pb2.ChatMessages(messages=[turn])),
            **fields,  # type: ignore[arg-type]
        )
        async for message in self.remote.stream(self.stub.Generate, request, timeout=60):
            yield message

    async def answer(self, instance_id: str, question: str) -> str:
        return "".join([part.text async for part in self.generate(instance_id, question)])


async def eventually(condition: Callable[[], bool], seconds: float = 10) -> None:
    """Return once the condition holds; fail when it does not in time."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.02)
