"""A real topology process, and nodes that consist of nothing but identity and agent."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import click

from services.common.addresses import HostPort, parse_host_port
from services.common.channel import Remote
from services.common.server import Server, announce, run, start_server, until_stopped
from services.topology.agent.agent import AgentOptions, TopologyAgent
from services.topology.agent.identity import Identity, held_identity
from services.topology.agent.report import MemoryRules
from services.topology.agent.rpc import identity_registration
from shardring.topology.v1 import topology_pb2, topology_service_pb2
from shardring.topology.v1.topology_service_pb2_grpc import TopologyServiceStub

LOOPBACK = HostPort("127.0.0.1", 0)
HEARTBEAT_SECONDS = 0.4


async def eventually(condition: Callable[[], Awaitable[bool]], seconds: float = 20) -> None:
    """Wait until a condition holds, and fail when it doesn't in time."""
    async with asyncio.timeout(seconds):
        while not await condition():
            await asyncio.sleep(0.02)


@asynccontextmanager
async def started(*command: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, HostPort]]:
    """Run a Python module as a process of its own; yield it and the address it announces."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", *command, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(30):
            line = (await process.stdout.readline()).decode()
        yield process, parse_host_port(line.split()[-1])
    finally:
        if process.returncode is None:
            process.terminate()
            async with asyncio.timeout(15):
                await process.wait()


class Client:
    """Calls a topology service."""

    def __init__(self, address: HostPort) -> None:
        self.address = address
        self.remote = Remote("topology", [address])
        self.stub = TopologyServiceStub(self.remote.channel)

    async def report_node(self, node: topology_pb2.Node) -> topology_service_pb2.ReportNodeResponse:
        request = topology_service_pb2.ReportNodeRequest(node=node)
        return await self.remote.unary(self.stub.ReportNode, request, timeout=10)

    async def report_links(
        self, source: str, *links: topology_pb2.Link
    ) -> topology_service_pb2.ReportLinksResponse:
        request = topology_service_pb2.ReportLinksRequest(source_node_id=source, links=links)
        return await self.remote.unary(self.stub.ReportLinks, request, timeout=10)

    async def get(self, revision: int | None = None) -> topology_service_pb2.GetTopologyResponse:
        request = topology_service_pb2.GetTopologyRequest(if_revision_not=revision)
        return await self.remote.unary(self.stub.GetTopology, request, timeout=10)

    async def node_ids(self) -> set[str]:
        return {node.node_id for node in (await self.get()).topology.nodes}

    async def pairs(self) -> set[tuple[str, str]]:
        """Return the (source, sink) pairs that are linked."""
        links = (await self.get()).topology.links
        return {(link.source_node_id, link.sink_node_id) for link in links}

    async def remove(self, node_id: str) -> topology_service_pb2.RemoveNodeResponse:
        request = topology_service_pb2.RemoveNodeRequest(node_id=node_id)
        return await self.remote.unary(self.stub.RemoveNode, request, timeout=10)

    @asynccontextmanager
    async def watch(
        self, after_revision: int | None = None, *, seconds: float = 30
    ) -> AsyncIterator[AsyncIterator[topology_service_pb2.WatchTopologyResponse]]:
        request = topology_service_pb2.WatchTopologyRequest(after_revision=after_revision)
        responses = self.remote.stream(self.stub.WatchTopology, request, timeout=seconds)
        async with contextlib.aclosing(responses):
            yield responses


@asynccontextmanager
async def topology(
    *options: str, listen: HostPort = LOOPBACK
) -> AsyncIterator[tuple[asyncio.subprocess.Process, Client]]:
    """Run a topology process in lab mode; yield it and a client of it."""
    command = ["services.topology", "--listen", str(listen), "--lab", "--log-level", "warning"]
    command += ["--heartbeat-seconds", str(HEARTBEAT_SECONDS), *options]
    async with started(*command) as (process, address):
        client = Client(address)
        try:
            yield process, client
        finally:
            await client.remote.close()


@dataclass(frozen=True)
class LabNode:
    """A node in this process."""

    agent: TopologyAgent
    server: Server
    task: asyncio.Task[None]

    async def leave(self) -> None:
        """Stop as a node does that is asked to."""
        self.task.cancel()
        await asyncio.wait([self.task])
        await self.server.stop()


def agent_options(topology: HostPort, identity: Identity, port: int, name: str) -> AgentOptions:
    return AgentOptions(
        topology=topology,
        identity=identity,
        listen=HostPort("127.0.0.1", port),
        name=name,
        lab=True,
        memory=MemoryRules(memory_bytes=2**30),
    )


@asynccontextmanager
async def lab_node(
    topology: HostPort,
    node_id: str,
    *,
    start_ns: int = 1_000,
    answers_as: str = "",
    fingerprint: str = "",
) -> AsyncIterator[LabNode]:
    """Run a node in this process; `answers_as` lets its server give another identity."""
    server = await start_server(LOOPBACK, [identity_registration(answers_as or node_id)])
    identity = Identity(node_id, start_ns, fingerprint)
    agent = TopologyAgent(agent_options(topology, identity, server.port, f"name-{node_id}"))
    node = LabNode(agent, server, asyncio.create_task(agent.run()))
    try:
        yield node
    finally:
        if not node.task.done():
            await node.leave()


@click.command()
@click.option("--topology", required=True)
@click.option("--data-folder", required=True, type=click.Path(path_type=Path))
def main(topology: str, data_folder: Path) -> None:
    """Run a node as a process of its own, put together as the composition root does it."""

    async def serve() -> None:
        with held_identity(data_folder) as identity:
            server = await start_server(LOOPBACK, [identity_registration(identity.node_id)])
            address = HostPort("127.0.0.1", server.port)
            agent = TopologyAgent(
                agent_options(parse_host_port(topology), identity, server.port, "process")
            )
            running = asyncio.create_task(agent.run())
            await agent.registered.wait()
            announce("node", address)
            await until_stopped()
            running.cancel()
            await asyncio.wait([running])
            await server.stop()

    run(serve)


if __name__ == "__main__":
    main()
