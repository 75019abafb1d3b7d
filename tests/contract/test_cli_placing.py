"""What commands ask of placement, and the drawing of what it answers."""

from collections.abc import AsyncIterator

import pytest

from shardring.common.v1 import common_pb2
from shardring.placement.v1 import placement_pb2, placement_service_pb2
from shardring.topology.v1 import topology_pb2
from tests.contract.cli_lab import MODEL, FakeCluster, fake_cluster


@pytest.fixture
async def cluster() -> AsyncIterator[FakeCluster]:
    async with fake_cluster("ada", "bob") as cluster:
        yield cluster


async def test_every_constraint_is_passed_on(cluster: FakeCluster) -> None:
    ada, bob = (cluster.nodes[name].node.node_id for name in ("ada", "bob"))
    run = await cluster.run(
        *("preview", MODEL, "--min-nodes", "2", "--layers", "ada=3", "--max-layers", "bob=12"),
        *("--context", "4096", "--concurrent", "8", "--keep-free-gb", "1.5"),
        *("--sharding", "tensor", "--backend", "all"),
    )
    assert (run.code, run.err) == (0, "")
    (request,) = cluster.placement.preview_requests
    assert request.sharding == common_pb2.SHARDING_TENSOR
    assert request.ring_backend == common_pb2.RING_BACKEND_UNSPECIFIED
    assert request.constraints == placement_service_pb2.PlacementConstraints(
        min_node_count=2,
        layer_counts={ada: 3},
        max_layer_counts={bob: 12},
        context_token_count=4096,
        concurrent_request_count=8,
        headroom_bytes=1_500_000_000,
    )


async def test_an_objective_is_passed_on_and_its_best_is_marked(cluster: FakeCluster) -> None:
    one, two = cluster.ring("ada"), cluster.ring("ada", "bob")
    for placement, milliseconds in ((one, 80), (two, 50)):
        predicted = placement.predicted_speed
        predicted.decode_latency.FromMilliseconds(milliseconds)
        predicted.tokens_per_second = 1000 / milliseconds
        predicted.throughput_tokens_per_second = 12.5
        predicted.slowest.hop_rank = 0
    cluster.placement.previews = [
        placement_service_pb2.Preview(node_count=count, placement=placement)
        for count, placement in ((1, one), (2, two))
    ]
    run = await cluster.run("preview", MODEL, "--objective", "latency")
    assert (run.code, run.err) == (0, "")
    (request,) = cluster.placement.preview_requests
    assert request.objective == placement_pb2.OBJECTIVE_DECODE_LATENCY
    heading = next(line for line in run.out.splitlines() if "taken by" in line)
    assert heading.startswith("2 nodes")
    shown = " ".join(run.out.split())
    assert "predicted 50 ms a token, 20 tokens/s for one request, 12.5 for many" in shown
    assert "bounded by the hop from ada to bob" in shown
    drawing = (await cluster.run("preview", MODEL, "--objective", "latency", "--dot", "-")).out
    assert drawing.count("fillcolor=lightblue") == 2


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (("--layers", "ada"), "NODE=COUNT"),
        (("--layers", "ada=many"), "NODE=COUNT"),
        (("--max-layers", "=3"), "NODE=COUNT"),
        (("--layers", "nobody=3"), "nobody"),
        (("--keep-free-gb", "nan"), "keep_free_gb"),
    ],
)
async def test_what_makes_no_sense_is_said(
    cluster: FakeCluster, option: tuple[str, str], words: str
) -> None:
    run = await cluster.run("preview", MODEL, *option)
    assert run.code == 1
    assert words in run.err


async def test_the_ring_is_drawn_into_the_topology(cluster: FakeCluster) -> None:
    ada, bob = (cluster.nodes[name].node.node_id for name in ("ada", "bob"))
    cluster.topology.topology.links.extend(
        topology_pb2.Link(source_node_id=a, sink_node_id=b) for a, b in ((ada, bob), (bob, ada))
    )
    cluster.placement.previews = [
        placement_service_pb2.Preview(
            node_count=1, refusal=common_pb2.Error(reason="NOT_ENOUGH_MEMORY")
        ),
        placement_service_pb2.Preview(node_count=2, placement=cluster.ring("bob", "ada")),
    ]
    drawing = (await cluster.run("preview", MODEL, "--dot", "-")).out
    assert drawing.startswith("digraph shardring {\n")
    assert drawing.endswith("}\n")
    assert drawing.count("fillcolor=lightblue") == 2
    assert r"\nrank 0: layers 0 to 3" in drawing
    hops = [line for line in drawing.splitlines() if "penwidth=3" in line]
    assert len(hops) == 1
