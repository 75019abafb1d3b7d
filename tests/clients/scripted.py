"""A server that answers as a later version of Shardring might, and notes what it was asked.

For values that the services of this version cannot be made to send.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from services.common.addresses import HostPort
from services.common.errors import Reason, ShardringError
from services.common.server import Registration, start_server
from shardring.common.v1 import common_pb2
from shardring.placement.v1 import placement_pb2, placement_service_pb2
from shardring.placement.v1.placement_service_pb2_grpc import (
    PlacementServiceServicer,
    add_PlacementServiceServicer_to_server,
)
from shardring.runner.v1 import instance_service_pb2, runner_pb2
from shardring.runner.v1.instance_service_pb2_grpc import (
    InstanceServiceServicer,
    add_InstanceServiceServicer_to_server,
)
from shardring.topology.v1 import topology_pb2, topology_service_pb2
from shardring.topology.v1.topology_service_pb2_grpc import (
    TopologyServiceServicer,
    add_TopologyServiceServicer_to_server,
)

# More than a double holds exactly, and the most that fits.
LARGE, LARGEST = 2**53 + 1, 2**63 - 1
# Latin, beyond 16 bits, Japanese, a combining accent, right to left.
TEXT = "Zoë 🦊 日本 e\u0301 שלום"
FUTURE = 99
NODE_COUNT = 64
# Together over the 4 MiB that gRPC takes by itself.
LONG_NAME = "ñ" * 64_000


def with_unknown(message: Message) -> None:
    """Add field 1000, a text, as a later version might."""
    message.MergeFromString(b"\xc2\x3e\x06future")


def unknown_count(message: Message) -> int:
    """Return how often that field is in a message or below."""
    return message.SerializeToString().count(b"\xc2\x3e\x06future")


@dataclass
class Seen:
    """What reached the server; `ended` tells of each stream that its caller left."""

    requests: list[Any] = field(default_factory=list)
    metadata: list[dict[str, str | bytes]] = field(default_factory=list)
    remaining_seconds: list[float] = field(default_factory=list)
    ended: asyncio.Queue[str] = field(default_factory=asyncio.Queue)
    # Set while a quiet stream is under way; sets it free.
    quiet: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    release: asyncio.Event = field(default_factory=asyncio.Event)

    def note(self, request: Message, context: Any) -> None:
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        self.remaining_seconds.append(context.time_remaining())

    @contextmanager
    def noting_the_end(self) -> Iterator[None]:
        """Note that a stream was left, wherever it then was."""
        try:
            yield
        except (asyncio.CancelledError, GeneratorExit):
            self.ended.put_nowait("cancelled")
            raise


def topology(names: list[str]) -> topology_pb2.Topology:
    """Return a topology of such nodes, with all that is strange in the first, and two links."""
    made = topology_pb2.Topology()
    for number, name in enumerate(names):
        node = made.nodes.add(
            node_id=f"n{number}",
            name=name,
            memory_total_bytes=LARGEST,
            memory_available_bytes=LARGE,
            backends=[common_pb2.BACKEND_CPU],
        )
        node.endpoints.add(address="fd00::7", port=65535)
        if number == 0:
            node.backends.append(FUTURE)  # type: ignore[arg-type]
            with_unknown(node)
    made.links.add(
        source_node_id="n0",
        sink_node_id="n1",
        sink_address="fd00::7",
        kind=FUTURE,
    )
    made.links.add(
        source_node_id="n1",
        sink_node_id="n0",
        sink_address="10.0.0.1",
        kind=topology_pb2.INTERFACE_KIND_WIFI,
        round_trip=Duration(seconds=2**33, nanos=1_999),
    )
    with_unknown(made)
    return made


class Topology(TopologyServiceServicer):
    def __init__(self, seen: Seen) -> None:
        self.seen = seen
        self.names = [TEXT, "plain"]

    async def GetTopology(self, request: Any, context: Any) -> Any:
        self.seen.note(request, context)
        return topology_service_pb2.GetTopologyResponse(topology=topology(self.names))


class Placement(PlacementServiceServicer):
    def __init__(self, seen: Seen) -> None:
        self.seen = seen
        self.address = HostPort("127.0.0.1", 0)

    def placement(self, model_id: str) -> placement_pb2.Placement:
        made = placement_pb2.Placement(model_id=model_id, commit="c0", layer_count=2)
        made.ring_backend = FUTURE  # type: ignore[assignment]
        rank = made.ranks.add(node_id="n0", node_name=TEXT, weight_bytes=LARGE)
        rank.layers.end = 2
        rank.endpoints.add(address=self.address.host, port=self.address.port)
        with_unknown(rank)
        with_unknown(made)
        return made

    async def Place(self, request: Any, context: Any) -> Any:
        self.seen.note(request, context)
        if request.model_id == "refused":
            raise ShardringError(
                Reason.TOPOLOGY_GATHERING,
                f"Noch nicht, {TEXT}: warte.",
                metadata={"refusal": "NO_NODES", "node_name": TEXT, "bytes": LARGEST},
                retry_delay_seconds=1.5,
            )
        if request.model_id == "untyped":
            await context.abort(grpc.StatusCode.DATA_LOSS, f"untyped {TEXT}")
        return placement_service_pb2.PlaceResponse(placement=self.placement(request.model_id))

    async def PreviewPlacements(self, request: Any, context: Any) -> Any:
        self.seen.note(request, context)
        response = placement_service_pb2.PreviewPlacementsResponse()
        response.previews.add(
            node_count=1,
            sharding=common_pb2.SHARDING_PIPELINE,
            ring_backend=FUTURE,
            placement=self.placement(request.model_id),
        )
        response.previews.add(
            node_count=2, refusal=common_pb2.Error(reason="FROM_THE_FUTURE", message=TEXT)
        )
        with_unknown(response)
        return response


class Instances(InstanceServiceServicer):
    def __init__(self, seen: Seen) -> None:
        self.seen = seen

    async def StartInstance(self, request: Any, context: Any) -> Any:
        self.seen.note(request, context)
        return instance_service_pb2.StartInstanceResponse()

    async def WatchInstance(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """Come to be READY over a state of the future, or fail, as the instance's id says."""
        with self.seen.noting_the_end():
            failing = request.instance_id == "failing"
            last = runner_pb2.INSTANCE_STATE_FAILED if failing else runner_pb2.INSTANCE_STATE_READY
            for state in (runner_pb2.INSTANCE_STATE_STARTING, FUTURE, last):
                instance = runner_pb2.Instance(state=state)  # type: ignore[arg-type]
                if failing and state == last:
                    instance.error.CopyFrom(
                        common_pb2.Error(
                            code=14, reason="FROM_THE_FUTURE", message=TEXT, metadata={"rank": "1"}
                        )
                    )
                yield instance_service_pb2.WatchInstanceResponse(instance=instance)
            if not failing:
                await asyncio.Event().wait()

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """Answer `TEXT` in parts. "endless" goes on, "silent" never begins, "quiet" begins late."""
        self.seen.note(request, context)
        with self.seen.noting_the_end():
            if request.instance_id == "silent":
                self.seen.quiet.release()
                await asyncio.Event().wait()
            if request.instance_id == "quiet":
                self.seen.quiet.release()
                await self.seen.release.wait()
            for char in TEXT:
                yield instance_service_pb2.GenerateResponse(text=char, token_ids=[ord(char)])
            while request.instance_id == "endless":
                yield instance_service_pb2.GenerateResponse(text="…")
                await asyncio.sleep(0.01)
            completion = runner_pb2.Completion(
                finish_reason=FUTURE,  # type: ignore[arg-type]
                prompt_token_count=2**31 - 1,
                completion_token_count=len(TEXT),
            )
            with_unknown(completion)
            yield instance_service_pb2.GenerateResponse(completion=completion)


@dataclass
class Scripted:
    """The running server."""

    seen: Seen
    topology: Topology
    address: HostPort


@asynccontextmanager
async def scripted() -> AsyncIterator[Scripted]:
    """Serve the three services on one port, as Shardring's servers are built."""
    seen = Seen()
    topology_, placement = Topology(seen), Placement(seen)  # type: ignore[abstract]
    instances = Instances(seen)  # type: ignore[abstract]
    server = await start_server(
        HostPort("127.0.0.1", 0),
        [
            Registration(
                "shardring.topology.v1.TopologyService",
                lambda s: add_TopologyServiceServicer_to_server(topology_, s),
            ),
            Registration(
                "shardring.placement.v1.PlacementService",
                lambda s: add_PlacementServiceServicer_to_server(placement, s),
            ),
            Registration(
                "shardring.runner.v1.InstanceService",
                lambda s: add_InstanceServiceServicer_to_server(instances, s),
            ),
        ],
    )
    placement.address = HostPort("127.0.0.1", server.port)
    try:
        yield Scripted(seen, topology_, placement.address)
    finally:
        await server.stop()
