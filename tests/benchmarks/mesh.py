"""Many nodes in one process: what their agents tell and ask a topology service, at their own pace.

    python -m tests.benchmarks.mesh TOPOLOGY_ADDRESS NODE_COUNT LINKS_EACH

Every node has a connection of its own, watches the nodes as agents do, sends a heartbeat whenever
the service wants one, and reports its links, with other figures each time, every few heartbeats.
Says "settled" on standard output once every node has reported all its links.
"""

import asyncio
import random
import sys
from contextlib import aclosing

from services.common.addresses import HostPort, parse_host_port
from services.common.channel import Remote
from services.common.errors import Reason, ShardringError
from services.topology.agent.agent import REFRESH_HEARTBEATS
from shardring.common.v1 import common_pb2
from shardring.topology.v1 import topology_pb2, topology_service_pb2
from shardring.topology.v1.topology_service_pb2_grpc import TopologyServiceStub
from tests.benchmarks.serving import give_way

MEMORY_BYTES = 64 * 2**30
_START_SECONDS = 6.0
_TIMEOUT_SECONDS = 30


def node_of(number: int) -> topology_pb2.Node:
    """Return the report of a node."""
    address = address_of(number)
    message = topology_pb2.Node(
        node_id=f"{number:032x}",
        name=f"studio-{number}",
        endpoints=[common_pb2.Endpoint(address=address, port=52420)],
        interfaces=[
            topology_pb2.NetworkInterface(
                name="en0", kind=topology_pb2.INTERFACE_KIND_ETHERNET, addresses=[address]
            )
        ],
        memory_total_bytes=MEMORY_BYTES,
        memory_available_bytes=MEMORY_BYTES // 2,
        backends=[common_pb2.BACKEND_METAL],
        machine_fingerprint=f"{number:064x}",
    )
    message.start_time.seconds = 1_000
    return message


def address_of(number: int) -> str:
    """Return the address of a node."""
    return f"10.1.{number // 250}.{number % 250 + 1}"


def links_of(number: int, count: int, each: int) -> topology_service_pb2.ReportLinksRequest:
    """Return a node's report of links to those that come after it, and some before."""
    request = topology_service_pb2.ReportLinksRequest(source_node_id=f"{number:032x}")
    request.source_start_time.seconds = 1_000
    # Half of them before it and half behind, so that every link has its counterpart.
    steps = [step for i in range(1, each // 2 + 1) for step in (i, -i)]
    if each % 2:
        steps.append(count // 2)
    for step in sorted({(number + step) % count for step in steps} - {number}):
        link = request.links.add(
            source_node_id=request.source_node_id,
            sink_node_id=f"{step:032x}",
            sink_address=address_of(step),
            kind=topology_pb2.INTERFACE_KIND_ETHERNET,
            sink_port=52420,
            source_interface="en0",
            throughput_bytes_per_second=117_000_000,
        )
        link.throughput_age.seconds = random.randrange(600)
        link.throughput_age.nanos = 1
    return request


class Agent:
    """One node's calls."""

    def __init__(self, topology: HostPort, number: int, count: int, each: int) -> None:
        self.remote = Remote("topology", [topology])
        self.settled = asyncio.Event()
        self._stub = TopologyServiceStub(self.remote.channel)
        self._node = node_of(number)
        self._links = links_of(number, count, each)

    async def run(self) -> None:
        """Report and watch until cancelled."""
        await asyncio.sleep(random.uniform(0, _START_SECONDS))
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch())
            group.create_task(self._report())

    async def _report(self) -> None:
        refresh_in = 0
        while True:
            self._node.memory_available_bytes = MEMORY_BYTES // 2 + random.randrange(2**25)
            answer = await self.remote.unary(
                self._stub.ReportNode,
                topology_service_pb2.ReportNodeRequest(node=self._node),
                timeout=_TIMEOUT_SECONDS,
            )
            refresh_in -= 1
            if refresh_in <= 0 or answer.links_wanted:
                refresh_in = REFRESH_HEARTBEATS
                for link in self._links.links:
                    link.round_trip.nanos = random.randrange(150_000, 250_000)
                    link.round_trip_median.nanos = link.round_trip.nanos + 30_000
                await self.remote.unary(
                    self._stub.ReportLinks, self._links, timeout=_TIMEOUT_SECONDS
                )
                self.settled.set()
            await asyncio.sleep(answer.heartbeat_interval.ToNanoseconds() / 1e9)

    async def _watch(self) -> None:
        request = topology_service_pb2.WatchTopologyRequest(without_links=True)
        while True:
            watch = self.remote.stream(self._stub.WatchTopology, request)
            try:
                async with aclosing(watch) as changes:
                    async for _ in changes:
                        pass
            except ShardringError as error:
                # Who falls behind starts again from a snapshot, as agents do.
                if error.reason is not Reason.REVISION_COMPACTED:
                    raise


async def main(topology: HostPort, count: int, each: int) -> None:
    """Run until terminated."""
    agents = [Agent(topology, number, count, each) for number in range(count)]
    async with asyncio.TaskGroup() as group:
        for agent in agents:
            group.create_task(agent.run())
        for agent in agents:
            await agent.settled.wait()
        print("settled", flush=True)


if __name__ == "__main__":
    give_way()
    asyncio.run(main(parse_host_port(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
