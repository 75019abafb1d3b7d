"""What placement takes over gRPC: one call beside its search, and many calls at once.

The service is a process of its own; topology and downloads are in-test servers that answer at once.
"""

import asyncio
import statistics
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc

from services.placement.domain.budget import Budget
from services.placement.domain.net import net_of
from services.placement.domain.search import TOTAL_STEPS, smallest_ring
from shardring.common.v1 import common_pb2
from shardring.downloads.v1 import downloads_pb2, downloads_service_pb2_grpc
from shardring.placement.v1 import placement_service_pb2, placement_service_pb2_grpc
from shardring.topology.v1 import topology_pb2, topology_service_pb2_grpc
from tests.benchmarks.clusters import (
    KINDS,
    LAYER_BYTES,
    MODEL_ID,
    Case,
    case_of,
    mesh,
    model_for,
    model_of,
    shapes,
)
from tests.benchmarks.report import Bar, Figure, Report
from tests.contract.test_placement_service import (
    FakeDownloads,
    FakeTopology,
    World,
    start_placement,
    stop,
)

TEN_TIMES = Bar("<", 10.0)
ITS_SHARE = Bar("<", 1.0)
CALLERS = 50
_QUICK = 20
_TIMEOUT = 120
_ROUNDS = 15


async def measure() -> Report:
    """Measure both."""
    figures = []
    case = mesh(64, KINDS[3])
    model = model_for(case, 21)
    async with _service(case, model.layer_count) as stub:
        whole, alone = [], []
        for _ in range(_ROUNDS):
            whole.append(await _timed(stub))
            candidates = case.candidates
            began = time.perf_counter()
            again = replace(candidates, net=net_of(candidates.graph))
            smallest_ring(again, model, 1, Budget(TOTAL_STEPS))
            alone.append(time.perf_counter() - began)
        ratio = statistics.median(a / b for a, b in zip(whole, alone, strict=True))
        figures += [
            Figure("placement.call_64", statistics.median(whole) * 1e3, "ms"),
            Figure("placement.call_64.beside_search", ratio, "times", TEN_TIMES),
        ]
        async with _busy(stub, placement_service_pb2.PreviewPlacementsRequest(model_id=MODEL_ID)):
            waits = [await _timed(stub, constraints={"min_node_count": 1}) for _ in range(5)]
        figures.append(Figure("placement.call_64.during_previews", max(waits) * 1e3, "ms, worst"))
    figures += await _many()
    return Report([], figures)


async def _many() -> list[Figure]:
    """Hard searches, and beside them quick ones, which should wait no longer than their share."""
    pairs = dict(shapes(128))["degree 4"]
    case = case_of(128, pairs, KINDS[3], 1)
    layers = 60
    # It fits on one node, unless more are asked for.
    async with _service(case, layers, LAYER_BYTES // 5) as stub:
        quick_alone = [await _timed(stub) for _ in range(5)]
        hard_alone = await _timed(stub, constraints={"min_node_count": 42})
        began = time.perf_counter()
        hard = [
            asyncio.create_task(_timed(stub, constraints={"min_node_count": 42}))
            for _ in range(CALLERS - 1)
        ]
        await asyncio.sleep(2)
        quick = [await _timed(stub) for _ in range(_QUICK)]
        still = sum(not task.done() for task in hard)
        await asyncio.gather(*hard)
        everything = time.perf_counter() - began
    share = CALLERS * statistics.median(quick_alone)
    return [
        Figure("placement.hard_alone", hard_alone, "s"),
        Figure("placement.quick_alone", statistics.median(quick_alone) * 1e3, "ms"),
        Figure("placement.all_50", everything, "s"),
        Figure("placement.still_searching", still, "hard ones when the quick ones had ended"),
        Figure("placement.quick_beside_49", statistics.median(quick) * 1e3, "ms"),
        Figure("placement.quick_of_its_share", max(quick) / share, "of it, worst", ITS_SHARE),
    ]


async def _timed(stub: Any, **fields: Any) -> float:
    request = placement_service_pb2.PlaceRequest(model_id=MODEL_ID, request_id="r", **fields)
    began = time.perf_counter()
    answer = await stub.Place(request, timeout=_TIMEOUT)
    assert answer.placement.ranks
    return time.perf_counter() - began


@asynccontextmanager
async def _busy(stub: Any, request: Any) -> AsyncIterator[None]:
    calls = [asyncio.create_task(_preview(stub, request)) for _ in range(4)]
    await asyncio.sleep(0.1)
    try:
        yield
    finally:
        await asyncio.gather(*calls)


async def _preview(stub: Any, request: Any) -> None:
    await stub.PreviewPlacements(request, timeout=_TIMEOUT)


@asynccontextmanager
async def _service(
    case: Case, layer_count: int, layer_bytes: int = LAYER_BYTES
) -> AsyncIterator[Any]:
    """Run placement in front of a cluster; yield a stub."""
    world = World(_topology(case), _model(layer_count, layer_bytes))
    server = grpc.server(ThreadPoolExecutor(32), options=[("grpc.max_send_message_length", -1)])
    topology: Any = FakeTopology
    downloads: Any = FakeDownloads
    topology_service_pb2_grpc.add_TopologyServiceServicer_to_server(topology(world), server)
    downloads_service_pb2_grpc.add_DownloadsServiceServicer_to_server(downloads(world), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    process, listening = await asyncio.to_thread(start_placement, address, address)
    try:
        async with grpc.aio.insecure_channel(listening) as channel:
            yield placement_service_pb2_grpc.PlacementServiceStub(channel)
    finally:
        await asyncio.to_thread(stop, process)
        server.stop(None).wait(10)


def _model(layer_count: int, layer_bytes: int) -> downloads_pb2.Model:
    whole = model_of(layer_count)
    return downloads_pb2.Model(
        model_id=whole.model_id,
        commit=whole.commit,
        model_type=whole.model_type,
        engine_supported=True,
        layer_count=layer_count,
        layer_bytes=[layer_bytes] * layer_count,
        weight_bytes=layer_bytes * layer_count,
    )


def _topology(case: Case) -> topology_pb2.Topology:
    message = topology_pb2.Topology()
    for node in case.cluster.nodes.values():
        message.nodes.add(
            node_id=node.node_id,
            name=node.name,
            memory_available_bytes=node.memory_available_bytes,
            backends=[common_pb2.BACKEND_METAL],
            endpoints=[
                common_pb2.Endpoint(address=point.host, port=point.port) for point in node.endpoints
            ],
        )
    for link in case.cluster.links:
        added = message.links.add(
            source_node_id=link.source,
            sink_node_id=link.sink,
            sink_address=link.address,
            kind=topology_pb2.INTERFACE_KIND_ETHERNET,
            throughput_bytes_per_second=link.throughput_bytes_per_second or 0,
        )
        added.round_trip.FromNanoseconds(link.round_trip_nanoseconds or 0)
    return message
