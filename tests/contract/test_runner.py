"""Runners over real gRPC, with real children in a real MLX ring.

Three nodes' runners are served in this process; their shards are processes of their own. Only the
downloads service is stood in for: the files are on disk already.
"""

import asyncio
import random
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
from mlx_lm import load, stream_generate

from services.common.addresses import HostPort
from services.common.channel import Remote
from services.common.errors import Reason, ShardringError
from services.common.server import start_server
from services.runner.app import Runner
from services.runner.bootstrap import registrations
from shardring.runner.v1 import instance_service_pb2 as pb
from shardring.runner.v1 import runner_pb2
from tests.contract.runner_lab import (
    FACTS,
    Node,
    ask,
    children,
    eventually,
    free_ports,
    place,
    refused,
    start_node,
    text,
    three_nodes,
)
from tests.fakes.files_on_disk import MODEL, FilesOnDisk

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def nodes() -> AsyncIterator[list[Node]]:
    async with three_nodes() as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ring(nodes: list[Node]) -> Node:
    """Three ranks, unevenly cut, serving as "ring"; the head."""
    await nodes[0].ready("ring", place(nodes, [1, 5]))
    return nodes[0]


async def test_a_ring_of_three_answers_right(ring: Node) -> None:
    for question, answer in random.Random(7).sample(FACTS, 20):
        assert await ring.answer("ring", question) == answer


async def test_a_ring_generates_what_one_machine_does(ring: Node) -> None:
    model, tokenizer = load(str(MODEL))
    prompt = tokenizer.encode("Tell me something about gold, Paris and the planets.")
    expected = [
        part.token
        for part in stream_generate(model, tokenizer, prompt, max_tokens=40)
        if part.token not in tokenizer.eos_token_ids
    ]
    ids = runner_pb2.GenerationInput(token_ids=runner_pb2.TokenIds(ids=prompt))
    messages = await ring.generate("ring", input=ids, max_token_count=40)
    assert [token for message in messages for token in message.token_ids] == expected


async def test_the_last_message_brings_the_figures(ring: Node) -> None:
    messages = await ring.generate("ring", input=ask(FACTS[0][0]))
    done = messages[-1].completion
    assert done.finish_reason == runner_pb2.FINISH_REASON_STOP
    assert done.completion_token_count == sum(len(m.token_ids) for m in messages)
    assert done.prompt_token_count > 5
    assert done.decode_duration.ToNanoseconds() > 0
    assert not any(message.HasField("completion") for message in messages[:-1])


async def test_a_token_limit_is_kept(ring: Node) -> None:
    messages = await ring.generate("ring", input=ask(FACTS[0][0]), max_token_count=3)
    assert messages[-1].completion.finish_reason == runner_pb2.FINISH_REASON_LENGTH
    assert messages[-1].completion.completion_token_count == 3


async def test_a_generation_ends_where_the_context_does(ring: Node) -> None:
    prompt = [20] * 500
    ids = runner_pb2.GenerationInput(token_ids=runner_pb2.TokenIds(ids=prompt))
    sampling = runner_pb2.Sampling(temperature=5, seed=1)
    done = (await ring.generate("ring", input=ids, sampling=sampling))[-1].completion
    assert done.prompt_token_count == 500
    assert done.completion_token_count <= 12


async def test_a_seed_gives_the_same_tokens_on_one_and_three_ranks(
    nodes: list[Node], ring: Node
) -> None:
    await nodes[1].ready("alone", place([nodes[1]], []))

    async def tokens(node: Node, instance_id: str, seed: int) -> list[int]:
        sampling = runner_pb2.Sampling(temperature=2, top_p=0.95, top_k=200, min_p=0.001, seed=seed)
        messages = await node.generate(
            instance_id, input=text("Some words:"), sampling=sampling, max_token_count=20
        )
        return [token for message in messages for token in message.token_ids]

    first = await tokens(ring, "ring", 5)
    assert first == await tokens(ring, "ring", 5)
    assert first == await tokens(nodes[1], "alone", 5)
    assert first != await tokens(ring, "ring", 6)
    await nodes[1].stop("alone")


async def test_requests_at_once_are_all_answered(ring: Node) -> None:
    asked = FACTS[:8]
    answers = await asyncio.gather(*(ring.answer("ring", question) for question, _ in asked))
    assert answers == [answer for _, answer in asked]


async def test_a_cancelled_request_ends_and_the_next_is_answered(ring: Node) -> None:
    request = pb.GenerateRequest(
        instance_id="ring",
        input=text("Go on and on:"),
        sampling=runner_pb2.Sampling(temperature=5, seed=3),
    )
    for _ in range(3):
        call = ring.instances.Generate(request)
        await call.read()
        call.cancel()
    question, answer = FACTS[3]
    assert await ring.answer("ring", question) == answer
    assert (await ring.get("ring")).request_count == 0


async def test_every_rank_knows_while_it_generates(nodes: list[Node], ring: Node) -> None:
    request = pb.GenerateRequest(
        instance_id="ring",
        input=text("Go on and on:"),
        sampling=runner_pb2.Sampling(temperature=5, seed=3),
    )
    await eventually(lambda: not any(node.runner.generating() for node in nodes))
    call = ring.instances.Generate(request)
    await call.read()
    assert all(node.runner.generating() for node in nodes)
    call.cancel()
    await eventually(lambda: not any(node.runner.generating() for node in nodes))


async def test_a_deadline_ends_a_request(ring: Node) -> None:
    request = pb.GenerateRequest(
        instance_id="ring",
        input=text("Go on and on:"),
        sampling=runner_pb2.Sampling(temperature=5, seed=3),
    )
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        async for _ in ring.instances.Generate(request, timeout=0.05):
            pass
    assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    question, answer = FACTS[3]
    assert await ring.answer("ring", question) == answer


@pytest.mark.parametrize(
    ("fields", "reason", "figures"),
    [
        ({"input": text("")}, Reason.PROMPT_EMPTY, {}),
        ({"input": ask("")}, Reason.PROMPT_EMPTY, {}),
        ({}, Reason.INVALID_FIELD, {"field": "input"}),
        (
            {"input": text("word " * 2000)},
            Reason.PROMPT_TOO_LONG,
            {"context_token_count": "512"},
        ),
        (
            {"input": text("hi"), "sampling": runner_pb2.Sampling(temperature=-1)},
            Reason.INVALID_FIELD,
            {"field": "sampling.temperature"},
        ),
        (
            {"input": text("hi"), "sampling": runner_pb2.Sampling(top_p=7)},
            Reason.INVALID_FIELD,
            {"field": "sampling.top_p"},
        ),
        ({"input": text("hi"), "max_token_count": -1}, Reason.INVALID_FIELD, {}),
        (
            {"input": runner_pb2.GenerationInput(token_ids=runner_pb2.TokenIds(ids=[10**6]))},
            Reason.INVALID_FIELD,
            {"field": "input.token_ids"},
        ),
    ],
)
async def test_a_bad_request_is_refused_alone(
    ring: Node, fields: dict[str, object], reason: Reason, figures: dict[str, str]
) -> None:
    with pytest.raises(ShardringError) as refusal:
        await ring.generate("ring", **fields)
    metadata = refused(refusal, reason)
    assert metadata | figures == metadata
    question, answer = FACTS[5]
    assert await ring.answer("ring", question) == answer


async def test_only_the_head_generates(nodes: list[Node], ring: Node) -> None:
    with pytest.raises(ShardringError) as refusal:
        await nodes[1].generate("ring", input=text("hi"))
    assert refused(refusal, Reason.NOT_HEAD)["head_node_id"] == "node-a"
    with pytest.raises(ShardringError) as refusal:
        await nodes[1].start("other", place(nodes, [2, 4]))
    assert refused(refusal, Reason.NOT_HEAD)["head_node_id"] == "node-a"


async def test_starting_again_changes_nothing(nodes: list[Node], ring: Node) -> None:
    before = {rank: process.pid for rank, process in children("ring").items()}
    running = (await ring.get("ring")).placement
    again = await ring.start("ring", running)
    assert again.state == runner_pb2.INSTANCE_STATE_READY
    assert {rank: process.pid for rank, process in children("ring").items()} == before
    with pytest.raises(ShardringError) as refusal:
        await ring.start("ring", place(nodes, [2, 4]))
    refused(refusal, Reason.INSTANCE_EXISTS)


async def test_an_unknown_instance_is_named(ring: Node) -> None:
    for call in (ring.get("nobody"), ring.stop("nobody"), ring.generate("nobody")):
        with pytest.raises(ShardringError) as refusal:
            await call
        assert refused(refusal, Reason.INSTANCE_NOT_FOUND) == {"instance_id": "nobody"}


async def test_a_placement_for_another_node_is_refused(nodes: list[Node]) -> None:
    placement = place(nodes, [2, 4])
    placement.ranks[1].endpoints[0].port = nodes[2].server.port
    with pytest.raises(ShardringError) as refusal:
        await nodes[0].start("astray", placement)
    metadata = refused(refusal, Reason.WRONG_NODE)
    assert metadata == {"expected_node_id": "node-b", "node_id": "node-c"}
    ended = await nodes[0].until("astray", runner_pb2.INSTANCE_STATE_STOPPED)
    assert ended.shards[0].state == runner_pb2.SHARD_STATE_STOPPED
    assert children("astray") == {}


async def test_a_taken_ring_port_is_refused_at_once(nodes: list[Node]) -> None:
    placement = place(nodes, [2, 4])
    port = int(placement.ranks[1].hosts[1].rpartition(":")[2])
    with socket.create_server(("0.0.0.0", port)), pytest.raises(ShardringError) as refusal:
        await nodes[0].start("taken", placement)
    assert refused(refusal, Reason.RING_PORT_IN_USE) == {"port": str(port), "node_id": "node-b"}


async def test_a_rank_that_cannot_be_reached_is_named(nodes: list[Node]) -> None:
    placement = place(nodes, [2, 4])
    placement.ranks[2].endpoints[0].port = free_ports(1)[0]
    with pytest.raises(ShardringError) as refusal:
        await nodes[0].start("apart", placement)
    assert "node-c" in refused(refusal, Reason.SERVICE_UNAVAILABLE)["service"]
    await eventually(lambda: children("apart") == {})


async def test_a_killed_child_fails_the_instance_everywhere(nodes: list[Node]) -> None:
    await nodes[0].ready("victim", place(nodes, [2, 4]))
    request = pb.GenerateRequest(
        instance_id="victim",
        input=text("Go on and on:"),
        sampling=runner_pb2.Sampling(temperature=5, seed=3),
    )
    stream = nodes[0].remote.stream(nodes[0].instances.Generate, request)
    sent = len((await anext(stream)).token_ids)
    children("victim")[1].kill()
    with pytest.raises(ShardringError) as failure:
        async for message in stream:
            sent += len(message.token_ids)
    metadata = refused(failure, Reason.INSTANCE_FAILED)
    assert metadata["rank"] == "1"
    assert metadata["node_id"] == "node-b"
    assert metadata["sent_token_count"] == str(sent)
    for node in nodes:
        instance = await node.until("victim", runner_pb2.INSTANCE_STATE_FAILED)
        assert instance.error.metadata["rank"] == "1"
        assert "node-b" in instance.error.message
    await eventually(lambda: children("victim") == {})
    with pytest.raises(ShardringError) as failure:
        await nodes[0].generate("victim", input=text("hi"))
    refused(failure, Reason.INSTANCE_FAILED)
    # The same id may be started anew.
    await nodes[0].ready("victim", place(nodes, [2, 4]))
    question, answer = FACTS[0]
    assert await nodes[0].answer("victim", question) == answer
    await nodes[0].stop("victim")


@pytest.mark.parametrize("rank", [0, 1, 2])
async def test_stopping_any_rank_stops_all(nodes: list[Node], rank: int) -> None:
    instance_id = f"stopped-{rank}"
    await nodes[0].ready(instance_id, place(nodes, [2, 4]))
    await nodes[rank].stop(instance_id)
    for node in nodes:
        instance = await node.until(instance_id, runner_pb2.INSTANCE_STATE_STOPPED)
        assert not instance.HasField("error")
    assert children(instance_id) == {}
    await nodes[rank].stop(instance_id)


async def test_stopping_while_generating_ends_the_stream(nodes: list[Node]) -> None:
    await nodes[0].ready("busy", place(nodes, [2, 4]))
    request = pb.GenerateRequest(
        instance_id="busy",
        input=text("Go on and on:"),
        sampling=runner_pb2.Sampling(temperature=5, seed=3),
    )
    stream = nodes[0].remote.stream(nodes[0].instances.Generate, request)
    await anext(stream)
    stopping = asyncio.create_task(nodes[2].stop("busy"))
    with pytest.raises(ShardringError) as refusal:
        async for message in stream:
            assert message
    refused(refusal, Reason.INSTANCE_NOT_READY)
    await stopping
    assert children("busy") == {}


async def test_a_node_that_leaves_fails_its_instances_elsewhere(nodes: list[Node]) -> None:
    guest = await start_node("guest")
    placement = place([nodes[0], guest], [4])
    await nodes[0].ready("visited", placement)
    await guest.runner.close("is stopping")
    await guest.remote.close()
    await guest.server.stop()
    instance = await nodes[0].until("visited", runner_pb2.INSTANCE_STATE_FAILED)
    assert instance.error.reason == Reason.NODE_LOST
    assert instance.error.metadata["node_id"] == "guest"
    assert instance.error.metadata["rank"] == "1"


async def test_a_model_that_lacks_weights_fails_with_its_reason(
    nodes: list[Node], tmp_path: Path
) -> None:
    for file in MODEL.iterdir():
        if not file.name.startswith("model-00002"):
            (tmp_path / file.name).symlink_to(file)

    runner = Runner("poor", FilesOnDisk(tmp_path))
    server = await start_server(HostPort("127.0.0.1", 0), registrations(runner))
    poor = Node("poor", runner, server, Remote("poor", [HostPort("127.0.0.1", server.port)]))
    await poor.start("partial", place([poor], []))
    instance = await poor.until("partial", runner_pb2.INSTANCE_STATE_FAILED)
    assert instance.error.reason == Reason.MODEL_MALFORMED
    assert instance.error.metadata["phase"] == "LOADING"
    # A stage that needs none of the missing file runs.
    await nodes[0].ready("enough", place([nodes[0], poor], [6]))
    question, answer = FACTS[1]
    assert await nodes[0].answer("enough", question) == answer
    await nodes[0].stop("enough")
    await runner.close("is stopping")
    await poor.remote.close()
    await server.stop()


async def test_instances_are_listed_in_pages(nodes: list[Node], ring: Node) -> None:
    seen: list[str] = []
    token = ""
    while True:
        request = pb.ListInstancesRequest(page_size=2, page_token=token)
        answer = await ring.remote.unary(ring.instances.ListInstances, request, timeout=5)
        assert len(answer.instances) <= 2
        seen += [instance.instance_id for instance in answer.instances]
        token = answer.next_page_token
        if not token:
            break
    assert "ring" in seen
    assert len(seen) == len(set(seen))
    with pytest.raises(ShardringError) as refusal:
        bad = pb.ListInstancesRequest(page_token="nonsense")
        await ring.remote.unary(ring.instances.ListInstances, bad, timeout=5)
    assert refused(refusal, Reason.INVALID_FIELD)["field"] == "page_token"
