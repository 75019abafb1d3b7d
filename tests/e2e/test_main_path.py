"""The main job on real processes: place, download, form the ring, answer right; one trace of it."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2

from services.cli.lab import Lab
from services.cli.spans import Span, SpanCollector, children_of
from services.common.errors import Reason, ShardringError
from shardring.downloads.v1 import downloads_service_pb2 as downloads_pb
from shardring.downloads.v1.downloads_service_pb2_grpc import DownloadsServiceStub
from shardring.runner.v1 import runner_pb2
from tests.e2e.client import MODEL, Client, eventually
from tests.e2e.conftest import MODELS, NODES
from tests.processes import children_with

pytestmark = pytest.mark.asyncio(loop_scope="module")

MEMORY_BYTES = 1_000_000_000  # what the lab gives each node
FACTS = json.loads((MODELS / "shardring" / "tiny-facts" / "facts.json").read_text())


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(lab: Lab) -> AsyncIterator[Client]:
    client = Client(lab)
    await client.node_ids(*NODES)
    yield client
    await client.close()


async def test_a_model_is_placed_fetched_and_answers_right(lab: Lab, client: Client) -> None:
    placement = await client.place(min_node_count=3)
    assert sorted(rank.node_name for rank in placement.ranks) == sorted(NODES)
    assert [len(rank.hosts) for rank in placement.ranks] == [3, 3, 3]
    head = client.head(placement)
    await head.ready("facts", placement)
    for fact in FACTS[:10]:
        assert await head.answer("facts", fact["question"]) == fact["answer"]

    # Each node holds its own layers' files, and the one in the middle not all of them.
    weights = sorted((MODELS / MODEL).glob("*.safetensors"))
    for rank in placement.ranks:
        snapshots = lab.folder / rank.node_name / "huggingface" / "hub"
        on_disk = sorted(snapshots.rglob("snapshots/*/*.safetensors"))
        assert 0 < len(on_disk) <= len(weights)
        if rank.rank == 1:
            assert len(on_disk) < len(weights)


async def test_every_rank_holds_its_own_layers_only(client: Client) -> None:
    for name in NODES:
        instance = await client.node(name).until("facts", runner_pb2.INSTANCE_STATE_READY)
        for rank, shard in zip(instance.placement.ranks, instance.shards, strict=True):
            assert 0 < shard.memory_bytes <= 1.1 * rank.weight_bytes


async def test_fractions_are_served(client: Client) -> None:
    remote = client.remote("downloads")
    request = downloads_pb.GetFractionsRequest(model_id=MODEL)
    call = DownloadsServiceStub(remote.channel).GetFractions
    fractions = (await remote.unary(call, request, timeout=5)).fractions
    assert len(fractions) == 3
    assert all(0 < entry.fraction <= 1 for entry in fractions)


async def test_one_trace_follows_the_start_and_a_request(
    client: Client, collector: SpanCollector
) -> None:
    """Who calls whom, in one trace: caller's process, callee's process, span."""
    expected_start = {
        ("node head", "node sibling", "/shardring.runner.v1.ShardService/StartShard"),
        ("node sibling", "downloads", "/shardring.downloads.v1.DownloadsService/StartDownload"),
        ("node head", "downloads", "/shardring.downloads.v1.DownloadsService/StartDownload"),
        ("node head", "rank 0", "ring init"),
        ("node head", "rank 0", "load"),
        ("node head", "rank 0", "warm-up"),
        ("node sibling", "rank 1", "ring init"),
        ("node sibling", "rank 1", "load"),
        ("node sibling", "rank 1", "warm-up"),
        ("node sibling", "rank 2", "ring init"),
        ("node sibling", "rank 2", "load"),
        ("node sibling", "rank 2", "warm-up"),
    }
    expected_request = {
        ("node head", "node head", "queue"),
        ("node head", "rank 0", "prefill"),
        ("node head", "rank 0", "decode"),
        ("node head", "rank 1", "prefill"),
        ("node head", "rank 1", "decode"),
        ("node head", "rank 2", "prefill"),
        ("node head", "rank 2", "decode"),
    }
    expected_place = {
        ("placement", "topology", "/shardring.topology.v1.TopologyService/GetTopology"),
        ("placement", "downloads", "/shardring.downloads.v1.DownloadsService/GetModel"),
        ("placement", "downloads", "/shardring.downloads.v1.DownloadsService/GetFractions"),
    }
    head = (await client.place(min_node_count=3)).ranks[0].node_name
    for root, expected in (
        ("/shardring.placement.v1.PlacementService/Place", expected_place),
        ("/shardring.runner.v1.InstanceService/StartInstance", expected_start),
        ("/shardring.runner.v1.InstanceService/Generate", expected_request),
    ):
        await eventually(lambda r=root, e=expected: e <= edges(collector.spans, r, head))  # type: ignore[misc]


def tree(spans: list[Span]) -> Iterator[tuple[int, Span]]:
    """Yield spans depth first with their depth."""
    children = children_of(spans)

    def below(parent_id: str, depth: int) -> Iterator[tuple[int, Span]]:
        for span in children.get(parent_id, []):
            yield depth, span
            yield from below(span.span_id, depth + 1)

    return below("", 0)


def edges(spans: list[Span], root: str, head: str) -> set[tuple[str, str, str]]:
    """Return (caller, callee, span) of the traces that hold a span of this name.

    Client and server span of one call count as one.
    """
    traces = {span.trace_id for span in spans if span.name == root}
    chosen = [span for span in spans if span.trace_id in traces]
    path: list[Span] = []
    found = set()
    for depth, span in tree(chosen):
        del path[depth:]
        caller = next((s for s in reversed(path) if s.process != span.process), None)
        if path and span.name != path[-1].name and path[-1].process == span.process:
            caller = path[-1]
        if caller is not None:
            found.add((role(caller.process, head), role(span.process, head), span.name))
        path.append(span)
    return found


def role(process: str, head: str) -> str:
    """Return "node head" or "node sibling" for a node's process; others as they are."""
    if not process.startswith("node "):
        return process
    return "node head" if process == f"node {head}" else "node sibling"


async def test_no_health_check_or_heartbeat_is_traced(collector: SpanCollector) -> None:
    noise = ("Check", "ReportNode", "ReportLinks", "Identify", "WatchTopology", "AttachWorker")
    assert not [span.name for span in collector.spans if span.name.endswith(noise)]


@pytest.mark.parametrize(
    ("model_id", "reason"),
    [
        ("nobody/nothing", Reason.MODEL_NOT_FOUND),
        ("broken/weightless", Reason.MODEL_WITHOUT_WEIGHTS),
        ("broken/unknown-architecture", Reason.ARCHITECTURE_UNSUPPORTED),
        ("", Reason.INVALID_FIELD),
        ("../../etc/passwd", Reason.INVALID_FIELD),
    ],
)
async def test_a_model_that_cannot_run_is_refused(
    client: Client, model_id: str, reason: Reason
) -> None:
    with pytest.raises(ShardringError) as refusal:
        await client.place(model_id=model_id)
    assert refusal.value.reason is reason, refusal.value


async def test_an_unknown_required_node_is_named(client: Client) -> None:
    with pytest.raises(ShardringError) as refusal:
        await client.place(required_node_ids=["f" * 32])
    assert refusal.value.reason is Reason.REQUIRED_NODE_UNKNOWN
    assert refusal.value.metadata["node_ids"] == "f" * 32


async def test_more_nodes_than_there_are_is_refused(client: Client) -> None:
    with pytest.raises(ShardringError) as refusal:
        await client.place(min_node_count=4)
    assert refusal.value.reason is Reason.NOT_ENOUGH_NODES
    assert refusal.value.metadata["min_node_count"] == "4"


async def test_a_service_that_is_down_is_named(lab: Lab, client: Client) -> None:
    for name in ("downloads", "topology"):
        await lab.processes[name].kill()
        with pytest.raises(ShardringError) as refusal:
            await client.place(min_node_count=3)
        assert refusal.value.reason is Reason.SERVICE_UNAVAILABLE
        assert refusal.value.metadata["service"] == name
        # Generating needs neither.
        answer = await client.node("ada").until("facts", runner_pb2.INSTANCE_STATE_READY)
        assert answer.state == runner_pb2.INSTANCE_STATE_READY
        await lab.restart(name)
        # What it knew comes back from the nodes.
        await client.node_ids(*NODES)
        await placed_again(client)


async def placed_again(client: Client) -> None:
    """Return once placement works again."""
    passing = (
        Reason.NO_WORKERS,
        Reason.TOPOLOGY_GATHERING,
        Reason.SERVICE_UNAVAILABLE,
        Reason.SERVICE_TIMEOUT,
    )
    async with asyncio.timeout(30):
        while True:
            try:
                await client.place(min_node_count=3)
                return
            except ShardringError as error:
                if error.reason not in passing:
                    raise
                await asyncio.sleep(0.1)


async def test_a_taken_port_is_said_in_words(lab: Lab, tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *lab.command("serve", "topology", "--listen", str(lab.address("topology"))),
        stderr=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
    )
    _, words = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 1
    text = words.decode()
    assert f"Cannot listen on {lab.address('topology')}" in text
    assert "Traceback" not in text


async def test_too_little_memory_is_told_by_node(lab: Lab, client: Client) -> None:
    poor = await lab.start_node("poor", memory_gb=0.0001)
    [node_id, *_] = await client.node_ids("poor", *NODES)
    with pytest.raises(ShardringError) as refusal:
        others = await client.node_ids(*NODES)
        await client.place(required_node_ids=[node_id], excluded_node_ids=others)
    metadata = refusal.value.metadata
    assert refusal.value.reason is Reason.NOT_ENOUGH_MEMORY
    assert int(metadata["needed_bytes"]) > int(metadata["available_bytes"])
    assert metadata[f"node.{node_id}.available_bytes"] == "100000"
    poor.terminate()
    assert await poor.stopped() == 0
    await client.topology_when(lambda t: all(node.name != "poor" for node in t.nodes))


async def test_a_node_killed_while_generating(lab: Lab, client: Client) -> None:
    """The stream ends with UNAVAILABLE, the instance is FAILED everywhere, nothing is left."""
    placement = await client.place(min_node_count=3, request_id="victim")
    head = client.head(placement)
    weights = {rank.node_name: rank.weight_bytes for rank in placement.ranks}
    free = await client.memory_when(lambda memory: len(memory) == len(NODES))
    await head.ready("victim", placement)
    await client.memory_when(
        lambda memory: all(memory[name] == free[name] - weights[name] for name in NODES)
    )
    victim = placement.ranks[1].node_name
    survivors = [rank.node_name for rank in placement.ranks if rank.node_name != victim]
    children = [
        child for name in NODES for child in children_with("victim", lab.processes[name].pid)
    ]
    assert len(children) == 3
    sampling = runner_pb2.Sampling(temperature=5, seed=1)
    stream = head.generate("victim", "Go on and on", sampling=sampling)
    sent = len((await anext(stream)).token_ids)
    await lab.processes[victim].kill()
    with pytest.raises(ShardringError) as failure:
        async for message in stream:
            sent += len(message.token_ids)
    assert failure.value.reason is Reason.INSTANCE_FAILED
    assert failure.value.metadata["node_id"] == placement.ranks[1].node_id
    assert failure.value.metadata["sent_token_count"] == str(sent)
    for name in survivors:
        instance = await client.node(name).until("victim", runner_pb2.INSTANCE_STATE_FAILED)
        assert victim in instance.error.message
    await eventually(lambda: not any(child.is_running() for child in children))

    # The node's memory is back in what placement counts with, and the node is gone from topology.
    topology = await client.topology_when(lambda t: len(t.nodes) == 2)
    assert {node.name for node in topology.nodes} == set(survivors)
    # "facts" ran on the killed node too, so nothing is promised any more.
    await client.memory_when(lambda memory: all(memory[name] == MEMORY_BYTES for name in survivors))

    # The node comes back under its old identity, and all three serve again.
    await lab.restart(victim)
    [node_id] = (await client.node_ids(victim, *survivors))[:1]
    assert node_id == placement.ranks[1].node_id
    again = await client.place(min_node_count=3, request_id="again")
    await client.head(again).ready("victim", again)
    fact = FACTS[0]
    assert await client.head(again).answer("victim", fact["question"]) == fact["answer"]
    await client.head(again).stop("victim")


async def test_health_is_served(lab: Lab) -> None:
    for name in ("topology", "downloads", "placement", "ada"):
        async with grpc.aio.insecure_channel(str(lab.address(name))) as channel:
            answer = await channel.unary_unary(
                "/grpc.health.v1.Health/Check",
                request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
                response_deserializer=health_pb2.HealthCheckResponse.FromString,
            )(health_pb2.HealthCheckRequest(), timeout=5)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
