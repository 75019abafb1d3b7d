"""A real placement process, between a real client and in-test topology and downloads servers."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.errors import Reason, ShardringError
from services.common.status import CODES, STATUS_DETAILS_KEY, error_to_trailers
from shardring.common.v1 import common_pb2
from shardring.downloads.v1 import (
    downloads_pb2,
    downloads_service_pb2,
    downloads_service_pb2_grpc,
)
from shardring.placement.v1 import (
    placement_pb2,
    placement_service_pb2,
    placement_service_pb2_grpc,
)
from shardring.topology.v1 import topology_pb2, topology_service_pb2, topology_service_pb2_grpc

GB = 10**9
TIMEOUT = 30
CALL_TIMEOUT = 20


@dataclass
class World:
    """What the in-test topology and downloads services answer."""

    topology: topology_pb2.Topology = field(default_factory=topology_pb2.Topology)
    model: downloads_pb2.Model = field(default_factory=downloads_pb2.Model)
    fractions: list[downloads_pb2.NodeFraction] = field(default_factory=list)
    # By method: an error it gives instead, or "hang".
    faults: dict[str, ShardringError | str] = field(default_factory=dict)
    # By method: how long the caller was willing to wait, in seconds, and what was asked.
    remaining: dict[str, float] = field(default_factory=dict)
    asked: dict[str, Any] = field(default_factory=dict)

    def meet(self, method: str, request: Any, context: grpc.ServicerContext) -> None:
        self.remaining[method] = context.time_remaining() or 0
        self.asked[method] = request
        fault = self.faults.get(method)
        if isinstance(fault, ShardringError):
            context.set_trailing_metadata(error_to_trailers(fault))
            context.abort(CODES[fault.reason], fault.message)
        elif fault == "hang":
            gone = threading.Event()
            if context.add_callback(gone.set):
                gone.wait(TIMEOUT)


class FakeTopology(topology_service_pb2_grpc.TopologyServiceServicer):
    def __init__(self, world: World) -> None:
        self.world = world

    def GetTopology(self, request: Any, context: Any) -> Any:
        self.world.meet("GetTopology", request, context)
        return topology_service_pb2.GetTopologyResponse(revision=1, topology=self.world.topology)


class FakeDownloads(downloads_service_pb2_grpc.DownloadsServiceServicer):
    def __init__(self, world: World) -> None:
        self.world = world

    def GetModel(self, request: Any, context: Any) -> Any:
        self.world.meet("GetModel", request, context)
        return downloads_service_pb2.GetModelResponse(model=self.world.model)

    def GetFractions(self, request: Any, context: Any) -> Any:
        self.world.meet("GetFractions", request, context)
        return downloads_service_pb2.GetFractionsResponse(fractions=self.world.fractions)


class Cluster:
    """A placement process and the world it sees."""

    def __init__(self, world: World, address: str, world_address: str = "") -> None:
        self.world, self.address, self.world_address = world, address, world_address
        self.channel = grpc.insecure_channel(address)
        self.stub = placement_service_pb2_grpc.PlacementServiceStub(self.channel)

    def place(self, *, timeout: float = CALL_TIMEOUT, **fields: Any) -> Any:
        request = placement_service_pb2.PlaceRequest(
            **{"model_id": "org/model", "request_id": "i-1", **fields}
        )
        return self.stub.Place(request, timeout=timeout)

    def refusal(self, **fields: Any) -> tuple[Reason, dict[str, str], status_pb2.Status]:
        with pytest.raises(grpc.RpcError) as raised:
            self.place(**fields)
        return refusal_of(raised.value)


def refusal_of(error: Any) -> tuple[Reason, dict[str, str], status_pb2.Status]:
    """The reason, its metadata and the whole status, whose code fits the reason."""
    packed = dict(error.trailing_metadata())[STATUS_DETAILS_KEY]
    status = status_pb2.Status.FromString(packed)
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    reason = Reason(info.reason)
    assert info.domain == "shardring"
    assert error.code() is CODES[reason]
    assert status.code == CODES[reason].value[0]
    return reason, dict(info.metadata), status


def start_placement(topology: str, downloads: str) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "services.placement", "--listen", "127.0.0.1:0"]
        + ["--topology", topology, "--downloads", downloads, "--log-level", "warning"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout
    line = process.stdout.readline()
    assert line.startswith("shardring placement listens on 127.0.0.1:"), line
    return process, line.split()[-1]


def stop(process: subprocess.Popen[str]) -> int:
    process.terminate()
    code = process.wait(TIMEOUT)
    assert process.stdout
    process.stdout.close()
    return code


@pytest.fixture(scope="module")
def running() -> Iterator[Cluster]:
    world = World()
    server = grpc.server(ThreadPoolExecutor(32))
    # What the fakes do not define, placement must not call: it is answered UNIMPLEMENTED.
    topology: Any = FakeTopology
    downloads: Any = FakeDownloads
    topology_service_pb2_grpc.add_TopologyServiceServicer_to_server(topology(world), server)
    downloads_service_pb2_grpc.add_DownloadsServiceServicer_to_server(downloads(world), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    process, listening = start_placement(address, address)
    cluster = Cluster(world, listening, address)
    try:
        yield cluster
    finally:
        cluster.channel.close()
        code = stop(process)
        server.stop(None).wait(TIMEOUT)
    assert code == 0


@pytest.fixture
def cluster(running: Cluster) -> Cluster:
    """Three nodes in a full mesh, a model of six layers of which a third fits on each."""
    world = running.world
    for name, value in vars(
        World(
            topology=topology_of({"a": 3 * GB, "b": 3 * GB, "c": 3 * GB}),
            model=model_of(6),
            fractions=[],
        )
    ).items():
        setattr(world, name, value)
    return running


def topology_of(
    memory: dict[str, int], pairs: list[str] | None = None, **fields: Any
) -> topology_pb2.Topology:
    """Nodes in full mesh, or with the directed links named like "ab"."""
    if pairs is None:
        pairs = [a + b for a in memory for b in memory if a != b]
    links = [
        topology_pb2.Link(
            source_node_id=a,
            sink_node_id=b,
            sink_address=f"10.0.0.{ord(b)}",
            kind=topology_pb2.INTERFACE_KIND_ETHERNET,
        )
        for a, b in map(tuple, pairs)
    ]
    for link in links:
        link.round_trip.FromMicroseconds(200)
    nodes = [
        topology_pb2.Node(
            node_id=node_id,
            name=f"studio-{node_id}",
            endpoints=[
                common_pb2.Endpoint(address="192.168.7.7", port=52420),
                common_pb2.Endpoint(address=f"10.0.0.{ord(node_id)}", port=52420),
            ],
            memory_available_bytes=have,
            backends=[common_pb2.BACKEND_METAL, common_pb2.BACKEND_CPU],
        )
        for node_id, have in memory.items()
    ]
    return topology_pb2.Topology(nodes=nodes, links=links, **fields)


def model_of(layer_count: int, /, **fields: Any) -> downloads_pb2.Model:
    return downloads_pb2.Model(
        **{
            "model_id": "org/model",
            "commit": "c0ffee",
            "model_type": "llama",
            "engine_supported": True,
            "layer_count": layer_count,
            "layer_bytes": [GB] * layer_count,
            "embedding_bytes": GB // 2,
            "head_bytes": GB // 2,
            "weight_bytes": (layer_count + 1) * GB,
            **fields,
        }
    )


def test_place(cluster: Cluster) -> None:
    cluster.world.fractions = [
        downloads_pb2.NodeFraction(
            node_id="b",
            fraction=0.25,
            state=downloads_pb2.DOWNLOAD_STATE_ONGOING,
            downloaded_bytes=25,
            total_bytes=100,
        ),
        # Downloads still knows a node that topology does not.
        downloads_pb2.NodeFraction(node_id="z", state=downloads_pb2.DOWNLOAD_STATE_COMPLETED),
    ]
    placement = cluster.place(revision="v2").placement
    assert (placement.model_id, placement.commit, placement.layer_count) == (
        "org/model",
        "c0ffee",
        6,
    )
    assert [rank.node_id for rank in placement.ranks] == ["a", "b", "c"]
    assert [rank.node_name for rank in placement.ranks] == ["studio-a", "studio-b", "studio-c"]
    assert [(rank.layers.start, rank.layers.end) for rank in placement.ranks] == [
        (0, 2),
        (2, 4),
        (4, 6),
    ]
    assert [rank.weight_bytes for rank in placement.ranks] == [5 * GB // 2, 2 * GB, 5 * GB // 2]
    assert {rank.backend for rank in placement.ranks} == {common_pb2.BACKEND_METAL}
    port = placement.ranks[0].hosts[0].split(":")[1]
    assert 61000 <= int(port) <= 65000
    assert list(placement.ranks[1].hosts) == [
        f"10.0.0.{ord('a')}:{port}",
        f"0.0.0.0:{port}",
        f"10.0.0.{ord('c')}:{port}",
    ]
    # Verified from the other ranks first.
    assert [point.address for point in placement.ranks[0].endpoints] == [
        f"10.0.0.{ord('a')}",
        "192.168.7.7",
    ]
    score = placement.score
    assert (score.node_count, score.has_leaf, score.download_score) == (3, False, 0.25)
    assert score.memory_available_bytes == 9 * GB
    assert score.proven_optimal
    assert score.candidate_count >= 1
    for method in ("GetModel", "GetFractions"):
        assert cluster.world.asked[method].model_id == "org/model"
        assert cluster.world.asked[method].revision == "v2"


def test_the_same_question_gets_the_same_bytes(cluster: Cluster) -> None:
    first = cluster.place().SerializeToString(deterministic=True)
    assert cluster.place().SerializeToString(deterministic=True) == first
    # Whatever order topology tells of nodes and links in.
    known = cluster.world.topology
    cluster.world.topology = topology_pb2.Topology(
        nodes=reversed(known.nodes), links=reversed(known.links)
    )
    assert cluster.place().SerializeToString(deterministic=True) == first
    other = cluster.place(request_id="i-2").placement
    assert other.ranks[0].hosts[0] != cluster.place().placement.ranks[0].hosts[0]


def test_constraints(cluster: Cluster) -> None:
    cluster.world.model = model_of(1, embedding_bytes=0, head_bytes=0, weight_bytes=GB)

    def chosen(**constraints: Any) -> list[str]:
        return [rank.node_id for rank in cluster.place(constraints=constraints).placement.ranks]

    assert chosen() == ["a"]
    assert chosen(required_node_ids=["c"]) == ["c"]
    assert chosen(excluded_node_ids=["a"]) == ["b"]
    cluster.world.model = model_of(3)
    assert chosen(min_node_count=3) == ["a", "b", "c"]


def test_explicit_layers_and_limits(cluster: Cluster) -> None:
    def layers(**constraints: Any) -> dict[str, int]:
        ranks = cluster.place(constraints=constraints).placement.ranks
        return {rank.node_id: rank.layers.end - rank.layers.start for rank in ranks}

    cluster.world.topology = topology_of(dict.fromkeys("abc", 6 * GB))
    cluster.world.model = model_of(8)
    assert layers() == {"a": 4, "b": 4}
    assert layers(layer_counts={"c": 3}) == {"a": 5, "c": 3}
    assert layers(layer_counts={"a": 2, "b": 2, "c": 4}) == {"a": 2, "b": 2, "c": 4}
    assert layers(max_layer_counts={"a": 3}) == {"a": 3, "b": 5}
    assert layers(max_layer_counts={"a": 2}) == {"b": 4, "c": 4}
    assert layers(max_layer_counts={"a": 1, "b": 3, "c": 4}) == {"a": 1, "b": 3, "c": 4}
    reason, metadata, _ = cluster.refusal(constraints={"layer_counts": {"a": 5, "b": 4}})
    assert (reason, metadata["field"]) == (Reason.INVALID_FIELD, "constraints.layer_counts")
    reason, _, _ = cluster.refusal(constraints={"layer_counts": {"a": 7}})
    assert reason is Reason.NOT_ENOUGH_MEMORY
    reason, _, _ = cluster.refusal(constraints={"layer_counts": {"z": 1}})
    assert reason is Reason.REQUIRED_NODE_UNKNOWN


def test_the_cache_and_headroom_count(cluster: Cluster) -> None:
    cluster.world.topology = topology_of(dict.fromkeys("abc", 5 * GB))
    cluster.world.model = model_of(4, key_value_bytes_per_token=4 * 1000)
    assert len(cluster.place().placement.ranks) == 1
    # A thousand bytes a layer and token.
    asked = {"context_token_count": 50_000, "concurrent_request_count": 4}
    placed = cluster.place(constraints=asked).placement
    assert [rank.node_id for rank in placed.ranks] == ["a", "b"]
    assert [rank.cache_bytes for rank in placed.ranks] == [2 * 200_000_000] * 2
    assert [rank.weight_bytes for rank in placed.ranks] == [5 * GB // 2] * 2
    placed = cluster.place(constraints={"headroom_bytes": 5 * GB // 2}).placement
    assert [rank.memory_available_bytes for rank in placed.ranks] == [5 * GB // 2] * 2
    reason, metadata, _ = cluster.refusal(constraints={"headroom_bytes": 5 * GB})
    assert reason is Reason.NOT_ENOUGH_MEMORY
    assert metadata["available_bytes"] == "0"


def test_the_runner_up_and_why_it_lost(cluster: Cluster) -> None:
    def lost() -> tuple[list[str], str]:
        second = cluster.place().placement.score.runner_up
        return list(second.node_ids), placement_pb2.Rule.Name(second.lost_by)

    cluster.world.model = model_of(1)
    assert lost() == (["b"], "RULE_NODE_IDS")
    cluster.world.topology = topology_of({"a": 3 * GB, "b": 4 * GB, "c": 5 * GB})
    assert lost() == (["b"], "RULE_MEMORY")
    cluster.world.fractions = [
        downloads_pb2.NodeFraction(node_id="a", state=downloads_pb2.DOWNLOAD_STATE_COMPLETED)
    ]
    assert lost() == (["c"], "RULE_DOWNLOAD_SCORE")
    cluster.world.model = model_of(9)
    assert not cluster.place().placement.score.HasField("runner_up")


def test_the_slowest_hop(cluster: Cluster) -> None:
    links = cluster.world.topology.links
    links[0].round_trip.FromMicroseconds(900)
    hop = cluster.place().placement.score.slowest_hop
    assert {hop.source_node_id, hop.sink_node_id} == {
        links[0].source_node_id,
        links[0].sink_node_id,
    }
    assert hop.round_trip.ToMicroseconds() == 900


def test_tensor_sharding(cluster: Cluster) -> None:
    cluster.world.topology = topology_of(dict.fromkeys("abcde", 3 * GB))
    fits = {"hidden_size": 4096, "key_value_head_count": 8, "tensor_supported": True}
    cluster.world.model = model_of(6, **fits)
    placed = cluster.place(sharding=common_pb2.SHARDING_TENSOR).placement
    assert placed.sharding == common_pb2.SHARDING_TENSOR
    # Half of the layers would not do beside embedding and head, which every rank holds; three
    # nodes would, but eight heads are not to be divided by three.
    assert [rank.node_id for rank in placed.ranks] == ["a", "b", "c", "d"]
    assert {(rank.layers.start, rank.layers.end) for rank in placed.ranks} == {(0, 6)}
    assert {rank.weight_bytes for rank in placed.ranks} == {GB + 6 * GB // 4}
    asked = {"sharding": common_pb2.SHARDING_TENSOR, "constraints": {"min_node_count": 5}}
    reason, metadata, _ = cluster.refusal(**asked)
    assert reason is Reason.SHARDING_UNSUPPORTED
    assert metadata["accepted_sizes"] == "1,2,4"
    cluster.world.model = model_of(6, **{**fits, "tensor_supported": False})
    reason, metadata, _ = cluster.refusal(
        sharding=common_pb2.SHARDING_TENSOR, constraints={"min_node_count": 2}
    )
    assert (reason, metadata["accepted_sizes"]) == (Reason.SHARDING_UNSUPPORTED, "1")
    cluster.world.model = model_of(1, **fits)
    placed = cluster.place(sharding=common_pb2.SHARDING_TENSOR).placement
    assert (len(placed.ranks), placed.sharding) == (1, common_pb2.SHARDING_PIPELINE)


def test_a_model_is_cut_where_it_may_be(cluster: Cluster) -> None:
    cluster.world.topology = topology_of(dict.fromkeys("abc", 5 * GB))
    cluster.world.model = model_of(6)
    stages = [(0, 3), (3, 6)]
    placed = cluster.place().placement
    assert [(rank.layers.start, rank.layers.end) for rank in placed.ranks] == stages
    cuts = downloads_pb2.Cuts(layers=[2, 99], obstacle="a reason")
    cluster.world.model = model_of(6, cuts=cuts)
    placed = cluster.place().placement
    assert [(rank.layers.start, rank.layers.end) for rank in placed.ranks] == [(0, 2), (2, 6)]
    reason, metadata, _ = cluster.refusal(constraints={"min_node_count": 3})
    assert reason is Reason.CUT_NOT_ALLOWED
    assert (metadata["allowed_cuts"], metadata["most_stage_count"]) == ("2", "2")
    cluster.world.model = model_of(6, cuts=downloads_pb2.Cuts(obstacle="a reason"))
    reason, metadata, _ = cluster.refusal()
    assert reason is Reason.CUT_NOT_ALLOWED
    assert metadata["obstacle"] == "a reason"
    assert (metadata["needed_bytes"], metadata["available_bytes"]) == (str(7 * GB), str(5 * GB))


def test_jaccl(cluster: Cluster) -> None:
    def with_rdma(pairs: list[str]) -> topology_pb2.Topology:
        topology = topology_of(dict.fromkeys("abcd", 3 * GB))
        for link in topology.links:
            if link.source_node_id + link.sink_node_id in pairs:
                link.rdma_device = f"rdma_to_{link.sink_node_id}"
        wifi = topology_pb2.Link(
            source_node_id="b",
            sink_node_id="a",
            sink_address="10.9.0.97",
            kind=topology_pb2.INTERFACE_KIND_WIFI,
        )
        topology.links.append(wifi)
        return topology

    jaccl = {"ring_backend": common_pb2.RING_BACKEND_JACCL}
    every = [a + b for a in "abc" for b in "abc" if a != b]
    cluster.world.topology = with_rdma(every)
    placed = cluster.place(**jaccl).placement
    assert placed.ring_backend == common_pb2.RING_BACKEND_JACCL
    assert [rank.node_id for rank in placed.ranks] == ["a", "b", "c"]
    assert [list(rank.rdma_devices) for rank in placed.ranks] == [
        ["", "rdma_to_b", "rdma_to_c"],
        ["rdma_to_a", "", "rdma_to_c"],
        ["rdma_to_a", "rdma_to_b", ""],
    ]
    port = placed.ranks[0].coordinator.removeprefix("0.0.0.0:")
    # The cable that carries RDMA is Ethernet here, which goes before Wi-Fi.
    assert [rank.coordinator for rank in placed.ranks[1:]] == [f"10.0.0.97:{port}"] * 2
    assert not any(rank.hosts for rank in placed.ranks)
    # One missing pair, whatever ring the others form, and there are not enough left.
    cluster.world.topology = with_rdma([*every[1:], "ad", "da", "db", "bd"])
    reason, metadata, _ = cluster.refusal(**jaccl, constraints={"min_node_count": 3})
    assert reason is Reason.NO_RING
    assert metadata["missing_links"] == "a->b"
    cluster.world.topology = topology_of(dict.fromkeys("abc", 3 * GB))
    for node in cluster.world.topology.nodes:
        del node.backends[0]
    assert cluster.refusal(**jaccl)[0] is Reason.BACKEND_UNSUPPORTED


def test_previews_of_every_way(cluster: Cluster) -> None:
    cluster.world.model = model_of(
        6, hidden_size=4096, key_value_head_count=9, tensor_supported=True
    )
    request = placement_service_pb2.PreviewPlacementsRequest(model_id="org/model")
    previews = cluster.stub.PreviewPlacements(request, timeout=CALL_TIMEOUT).previews
    ways = [
        (
            common_pb2.Sharding.Name(p.sharding).removeprefix("SHARDING_"),
            common_pb2.RingBackend.Name(p.ring_backend).removeprefix("RING_BACKEND_"),
            p.node_count,
            p.refusal.reason or "placed",
        )
        for p in previews
    ]
    assert ways[:3] == [
        ("PIPELINE", "MLX_RING", 1, "NOT_ENOUGH_MEMORY"),
        ("PIPELINE", "MLX_RING", 2, "NOT_ENOUGH_MEMORY"),
        ("PIPELINE", "MLX_RING", 3, "placed"),
    ]
    assert ("PIPELINE", "JACCL", 3, "NO_RING") in ways
    assert ("TENSOR", "MLX_RING", 2, "SHARDING_UNSUPPORTED") in ways
    assert len(ways) == 12


def test_previews(cluster: Cluster) -> None:
    cluster.world.model = model_of(5, embedding_bytes=0, head_bytes=0, weight_bytes=5 * GB)
    request = placement_service_pb2.PreviewPlacementsRequest(
        model_id="org/model",
        sharding=common_pb2.SHARDING_PIPELINE,
        ring_backend=common_pb2.RING_BACKEND_MLX_RING,
    )
    previews = cluster.stub.PreviewPlacements(request, timeout=CALL_TIMEOUT).previews
    assert [preview.node_count for preview in previews] == [1, 2, 3]
    assert [preview.WhichOneof("outcome") for preview in previews] == [
        "refusal",
        "placement",
        "placement",
    ]
    refusal = previews[0].refusal
    assert (refusal.code, refusal.reason) == (9, "NOT_ENOUGH_MEMORY")
    assert refusal.metadata["shortfall_bytes"] == str(2 * GB)
    assert [len(preview.placement.ranks) for preview in previews] == [0, 2, 3]


@pytest.mark.parametrize(
    ("fields", "field_name"),
    [
        ({"model_id": ""}, "model_id"),
        ({"model_id": "not a name"}, "model_id"),
        ({"constraints": {"min_node_count": -1}}, "constraints.min_node_count"),
        ({"constraints": {"min_node_count": 2**31 - 1}}, "constraints.min_node_count"),
        (
            {"constraints": {"required_node_ids": ["a"], "excluded_node_ids": ["a"]}},
            "constraints.excluded_node_ids",
        ),
        ({"constraints": {"required_node_ids": [""]}}, "constraints.required_node_ids"),
        ({"request_id": "r" * 300}, "request_id"),
        ({"constraints": {"layer_counts": {"a": 0}}}, "constraints.layer_counts"),
        ({"constraints": {"max_layer_counts": {"a": -3}}}, "constraints.max_layer_counts"),
        (
            {"constraints": {"layer_counts": {"a": 3}, "max_layer_counts": {"a": 2}}},
            "constraints.layer_counts",
        ),
        (
            {"constraints": {"layer_counts": {"a": 3}, "excluded_node_ids": ["a"]}},
            "constraints.layer_counts",
        ),
        (
            {"constraints": {"layer_counts": {"a": 3}}, "sharding": 2},
            "constraints.layer_counts",
        ),
        ({"constraints": {"context_token_count": -1}}, "constraints.context_token_count"),
        (
            {"constraints": {"concurrent_request_count": 2**31 - 1}},
            "constraints.concurrent_request_count",
        ),
        ({"constraints": {"headroom_bytes": -1}}, "constraints.headroom_bytes"),
        ({"sharding": 77}, "sharding"),
        ({"ring_backend": 77}, "ring_backend"),
    ],
)
def test_invalid_requests(cluster: Cluster, fields: dict[str, Any], field_name: str) -> None:
    reason, metadata, _ = cluster.refusal(**fields)
    assert reason is Reason.INVALID_FIELD
    assert metadata["field"] == field_name


def test_refused_no_nodes(cluster: Cluster) -> None:
    cluster.world.topology = topology_of({})
    # Without nodes there are no workers either; what the cluster lacks is said first.
    cluster.world.faults["GetModel"] = ShardringError(Reason.NO_WORKERS, "No worker.")
    assert cluster.refusal()[0] is Reason.NO_NODES


def test_refused_topology_gathering(cluster: Cluster) -> None:
    cluster.world.topology = topology_of({"a": GB}, gathering=True)
    reason, metadata, status = cluster.refusal()
    assert reason is Reason.TOPOLOGY_GATHERING
    assert metadata["refusal"] == "NOT_ENOUGH_MEMORY"
    retry = error_details_pb2.RetryInfo()
    assert status.details[1].Unpack(retry)
    assert retry.retry_delay.ToMilliseconds() > 0


def test_refused_required_node_unknown(cluster: Cluster) -> None:
    reason, metadata, _ = cluster.refusal(constraints={"required_node_ids": ["a", "x"]})
    assert reason is Reason.REQUIRED_NODE_UNKNOWN
    assert metadata == {"node_ids": "x", "node_count": "1"}


def test_refused_not_enough_nodes(cluster: Cluster) -> None:
    reason, metadata, _ = cluster.refusal(constraints={"min_node_count": 4})
    assert reason is Reason.NOT_ENOUGH_NODES
    assert (metadata["min_node_count"], metadata["node_count"]) == ("4", "3")


def test_refused_not_enough_memory(cluster: Cluster) -> None:
    cluster.world.topology = topology_of({"a": GB, "b": 2 * GB})
    reason, metadata, status = cluster.refusal()
    assert reason is Reason.NOT_ENOUGH_MEMORY
    assert metadata == {
        "needed_bytes": str(7 * GB),
        "available_bytes": str(3 * GB),
        "shortfall_bytes": str(4 * GB),
        "node_count": "2",
        "node.a.needed_bytes": str(5 * GB // 2),
        "node.a.available_bytes": str(GB),
        "node.a.short_bytes": "1500000000",
        "node.b.needed_bytes": str(9 * GB // 2),
        "node.b.available_bytes": str(2 * GB),
        "node.b.short_bytes": "2500000000",
        "rejected.1": "memory",
        "rejected.1.memory": "2",
        "rejected.2": "memory",
        "rejected.2.memory": "1",
    }
    assert "studio-b needs 4.5 GB and has 2.0 GB" in status.message


def test_refused_no_ring(cluster: Cluster) -> None:
    cluster.world.topology = topology_of(
        {"a": 9 * GB, "b": 9 * GB, "c": 9 * GB}, ["ab", "ba", "bc", "cb", "ac"]
    )
    reason, metadata, status = cluster.refusal(constraints={"min_node_count": 3})
    assert reason is Reason.NO_RING
    assert metadata == {
        "min_node_count": "3",
        "rejected.3": "not_linked",
        "rejected.3.not_linked": "1",
        "one_way_pairs": "a->c",
        "missing_links": "c->a",
    }
    assert "studio-c does not reach studio-a" in status.message


def test_refused_backend_unsupported(cluster: Cluster) -> None:
    for node in cluster.world.topology.nodes:
        node.ClearField("backends")
    reason, metadata, _ = cluster.refusal()
    assert reason is Reason.BACKEND_UNSUPPORTED
    assert metadata["node_ids"] == "a,b,c"


def test_refused_too_few_layers(cluster: Cluster) -> None:
    cluster.world.model = model_of(2)
    reason, metadata, _ = cluster.refusal(constraints={"min_node_count": 3})
    assert reason is Reason.TOO_FEW_LAYERS
    assert metadata == {"layer_count": "2", "min_node_count": "3"}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"engine_supported": False}, Reason.ARCHITECTURE_UNSUPPORTED),
        ({"layer_count": 0, "layer_bytes": []}, Reason.MODEL_MALFORMED),
        ({"layer_count": 7}, Reason.MODEL_MALFORMED),
        ({"layer_bytes": [GB] * 5 + [-GB]}, Reason.MODEL_MALFORMED),
    ],
)
def test_refused_models(cluster: Cluster, fields: dict[str, Any], expected: Reason) -> None:
    cluster.world.model = model_of(6, **fields)
    reason, metadata, _ = cluster.refusal()
    assert reason is expected
    assert metadata["model_id"] == "org/model"


@pytest.mark.parametrize(
    "reason",
    [
        Reason.MODEL_NOT_FOUND,
        Reason.MODEL_ACCESS_DENIED,
        Reason.MODEL_WITHOUT_WEIGHTS,
        Reason.HUB_UNREACHABLE,
        Reason.NO_WORKERS,
    ],
)
def test_what_downloads_refuses_is_passed_on(cluster: Cluster, reason: Reason) -> None:
    cluster.world.faults["GetModel"] = ShardringError(
        reason, "As downloads said.", metadata={"model_id": "org/model"}
    )
    found, metadata, status = cluster.refusal()
    assert (found, metadata, status.message) == (
        reason,
        {"model_id": "org/model"},
        "As downloads said.",
    )


@pytest.mark.parametrize(
    ("method", "service"),
    [("GetTopology", "topology"), ("GetModel", "downloads"), ("GetFractions", "downloads")],
)
def test_a_slow_service_is_named(cluster: Cluster, method: str, service: str) -> None:
    cluster.world.faults[method] = "hang"
    reason, metadata, _ = cluster.refusal(timeout=2)
    assert reason is Reason.SERVICE_TIMEOUT
    assert metadata["service"] == service


def test_the_callers_deadline_is_passed_on(cluster: Cluster) -> None:
    cluster.place(timeout=3)
    methods = {"GetTopology", "GetModel", "GetFractions"}
    assert set(cluster.world.remaining) == methods
    assert all(0 < cluster.world.remaining[method] <= 3 for method in methods)


@pytest.mark.parametrize("service", ["topology", "downloads"])
def test_a_service_that_is_down_is_named(cluster: Cluster, service: str) -> None:
    # Port 9 of the loopback address: nothing listens there.
    up = cluster.world_address
    down = {"topology": up, "downloads": up, service: "127.0.0.1:9"}
    process, listening = start_placement(down["topology"], down["downloads"])
    alone = Cluster(cluster.world, listening)
    try:
        stub: Any = health_pb2_grpc.HealthStub(alone.channel)
        health = stub.Check(health_pb2.HealthCheckRequest(), timeout=CALL_TIMEOUT)
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        reason, metadata, status = alone.refusal()
        assert reason is Reason.SERVICE_UNAVAILABLE
        assert metadata == {"service": service, "address": "127.0.0.1:9"}
        assert service in status.message
    finally:
        alone.channel.close()
        assert stop(process) == 0


def calibrate(cluster: Cluster, **billions: int) -> None:
    """Tell what nodes read per second, in GB, and measure all links."""
    for node in cluster.world.topology.nodes:
        node.weight_bytes_per_second = billions[node.node_id] * GB
        node.multiply_adds_per_second = 1000 * GB
    for link in cluster.world.topology.links:
        link.throughput_bytes_per_second = GB


def test_an_objective_makes_the_split_follow_speed(cluster: Cluster) -> None:
    cluster.world.topology = topology_of(dict.fromkeys("abc", 9 * GB))
    cluster.world.model = model_of(6, hidden_size=4096, hidden_bytes_per_value=2)
    calibrate(cluster, a=10, b=100, c=50)
    plain = cluster.place().placement
    assert [rank.node_id for rank in plain.ranks] == ["a"]
    # Six layers and the head of 10 GB a second.
    assert plain.predicted_speed.decode_latency.ToMilliseconds() == 650
    assert plain.predicted_speed.tokens_per_second == pytest.approx(1 / 0.65)
    assert plain.predicted_speed.slowest.WhichOneof("part") == "stage_rank"
    latency = cluster.place(objective=placement_pb2.OBJECTIVE_DECODE_LATENCY).placement
    assert [rank.node_id for rank in latency.ranks] == ["b"]
    assert latency.predicted_speed.decode_latency.ToMilliseconds() == 65
    assert latency.score.proven_optimal
    throughput = cluster.place(objective=placement_pb2.OBJECTIVE_THROUGHPUT).placement
    layers = {rank.node_id: rank.layers.end - rank.layers.start for rank in throughput.ranks}
    # The fastest last, for it has to run the head as well.
    assert layers == {"c": 2, "b": 4}
    predicted = throughput.predicted_speed
    assert predicted.throughput_tokens_per_second == pytest.approx(1 / 0.045)
    assert predicted.slowest.time.ToMilliseconds() == 45
    assert predicted.slowest.stage_rank == 1
    assert predicted.prefill_tokens_per_second > 0


def test_previews_with_an_objective(cluster: Cluster) -> None:
    cluster.world.topology = topology_of(dict.fromkeys("abc", 4 * GB))
    calibrate(cluster, a=10, b=100, c=50)
    request = placement_service_pb2.PreviewPlacementsRequest(
        model_id="org/model", objective=placement_pb2.OBJECTIVE_DECODE_LATENCY
    )
    previews = cluster.stub.PreviewPlacements(request, timeout=CALL_TIMEOUT).previews
    assert [p.refusal.reason or "placed" for p in previews] == [
        "NOT_ENOUGH_MEMORY",
        "placed",
        "placed",
    ]
    assert {rank.node_id for rank in previews[1].placement.ranks} == {"b", "c"}
    request.sharding = common_pb2.SHARDING_TENSOR
    with pytest.raises(grpc.RpcError) as raised:
        cluster.stub.PreviewPlacements(request, timeout=CALL_TIMEOUT)
    assert refusal_of(raised.value)[1]["field"] == "objective"


def test_an_objective_needs_figures(cluster: Cluster) -> None:
    asked = {"objective": placement_pb2.OBJECTIVE_THROUGHPUT}
    reason, metadata, status = cluster.refusal(**asked)
    assert reason is Reason.NOT_CALIBRATED
    assert metadata == {"node_ids": "a,b,c", "node_count": "3", "unmeasured_pairs": ""}
    assert "studio-a" in status.message
    assert not cluster.place().placement.HasField("predicted_speed")
    assert cluster.refusal(objective=7)[1]["field"] == "objective"
    cluster.world.topology.gathering = True
    reason, metadata, _ = cluster.refusal(**asked)
    assert (reason, metadata["refusal"]) == (Reason.TOPOLOGY_GATHERING, "NOT_CALIBRATED")


def test_many_callers_at_once(cluster: Cluster) -> None:
    cluster.world.topology = topology_of({chr(97 + i): 3 * GB + i for i in range(24)})
    cluster.world.model = model_of(24)
    with ThreadPoolExecutor(20) as pool:
        placements = list(
            pool.map(lambda i: cluster.place(request_id=f"r{i}").placement, range(20))
        )
    rings = {tuple(rank.node_id for rank in placement.ranks) for placement in placements}
    assert len(rings) == 1
    assert len({placement.ranks[0].hosts[0] for placement in placements}) > 1


def test_a_taken_port_is_said_plainly(cluster: Cluster) -> None:
    process = subprocess.run(
        [sys.executable, "-m", "services.placement", "--listen", cluster.address],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert process.returncode == 1
    assert f"Cannot listen on {cluster.address}" in process.stderr
    assert "Traceback" not in process.stderr
