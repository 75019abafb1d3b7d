"""Shardring to be measured: a lab cluster of real processes, seen by a gRPC client."""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from services.cli.lab import Lab
from shardring.common.v1 import common_pb2
from shardring.placement.v1 import placement_pb2
from shardring.runner.v1 import instance_service_pb2
from tests.benchmarks.generate import generate_all
from tests.benchmarks.measure import Run
from tests.e2e.client import Client

# The topology service's default; labs otherwise beat faster, so that tests wait less.
_HEARTBEAT_SECONDS = 3.0
# What the clusters here add to and take from the environment: nothing is traced, wherever to.
_NO_TRACING = dict.fromkeys(
    ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"), ""
)


@dataclass(frozen=True)
class Instance:
    """A READY instance of a model. `start_seconds`: from placing it to READY, with downloads."""

    client: Client
    instance_id: str
    placement: placement_pb2.Placement
    start_seconds: float

    async def generate(self, prompt: list[int], token_count: int) -> Run:
        """Generate `token_count` tokens at temperature 0, over gRPC."""
        return await self.generate_all([prompt], token_count)

    async def generate_all(self, prompts: list[list[int]], token_count: int) -> Run:
        """Generate `token_count` tokens from each prompt, all streams at once."""
        head = self.client.head(self.placement)
        return await generate_all(head.remote, self.instance_id, prompts, token_count)

    async def busy_fractions(self, seen: list[list[float]]) -> None:
        """Watch the instance; add to `seen`, by rank, what part of the time each one computes.

        Runs until it is cancelled.
        """
        head = self.client.head(self.placement)
        request = instance_service_pb2.WatchInstanceRequest(instance_id=self.instance_id)
        last = [0.0] * len(seen)
        async for message in head.remote.stream(head.stub.WatchInstance, request):
            for shard in message.instance.shards:
                # A change of another rank tells this one's again.
                busy = shard.usage.busy_fraction
                if busy and busy != last[shard.rank]:
                    seen[shard.rank].append(busy)
                    last[shard.rank] = busy

    async def stop(self) -> None:
        """Stop it."""
        await self.client.head(self.placement).stop(self.instance_id)


@dataclass(frozen=True)
class Cluster:
    """A lab whose nodes see each other."""

    lab: Lab
    client: Client

    async def start(self, model_id: str, node_count: int, *, tensor: bool = False) -> Instance:
        """Place a model on `node_count` nodes, start it and wait until it is READY.

        `tensor`: each node holds a part of every layer.
        """
        instance_id = model_id.partition("/")[2]
        began = time.perf_counter()
        placement = await self.client.place(
            model_id=model_id,
            request_id=instance_id,
            min_node_count=node_count,
            sharding=common_pb2.SHARDING_TENSOR if tensor else None,
        )
        await self.client.head(placement).ready(instance_id, placement)
        return Instance(self.client, instance_id, placement, time.perf_counter() - began)


@asynccontextmanager
async def cluster(
    folder: Path,
    hub: Path,
    *nodes: str,
    calibrate: bool = False,
    on_start: Callable[[str, int], None] = lambda name, pid: None,
) -> AsyncIterator[Cluster]:
    """Run hub, three services and these nodes, each a process of its own, with usual settings.

    Nodes do not `calibrate` themselves unless told to, for that would disturb what is measured.
    `on_start` is given each node's name and process id as soon as it runs.
    """
    lab = Lab(folder, environment={**_NO_TRACING, "SHARDRING_CALIBRATE": str(int(calibrate))})
    client = Client(lab)
    try:
        await lab.start_control(hub, heartbeat_seconds=_HEARTBEAT_SECONDS)
        for name in nodes:
            on_start(name, (await lab.start_node(name)).pid)
        await client.node_ids(*nodes)
        yield Cluster(lab, client)
    finally:
        await client.close()
        await lab.stop()
