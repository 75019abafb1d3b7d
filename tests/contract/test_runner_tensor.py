"""Ranks that each hold a part of every layer."""

import pytest

from services.common.errors import Reason, ShardringError
from shardring.common.v1 import common_pb2
from shardring.placement.v1 import placement_pb2
from shardring.runner.v1 import instance_service_pb2 as pb
from shardring.runner.v1 import runner_pb2
from tests.contract.runner_lab import FACTS, LAYERS, Node, ask, place, three_nodes


def tensor(nodes: list[Node]) -> placement_pb2.Placement:
    placement = place(nodes, list(range(1, len(nodes))))
    placement.sharding = common_pb2.SHARDING_TENSOR
    for rank in placement.ranks:
        rank.layers.start, rank.layers.end = 0, LAYERS
    return placement


async def test_two_ranks_answer_and_hold_a_part_each() -> None:
    async with three_nodes() as nodes:
        head = nodes[0]
        await head.ready("whole", place(nodes[:1], []))
        await head.ready("halves", tensor(nodes[:2]))
        for question, answer in FACTS[:6]:
            assert await head.answer("halves", question) == answer
        held = [shard.memory_bytes for shard in (await head.get("halves")).shards]
        alone = (await head.get("whole")).shards[0].memory_bytes
        # The embedding is held by both; four in five bytes of this model lie in its layers.
        assert all(memory < 0.75 * alone for memory in held)
        await head.stop("halves")


async def test_a_cancelled_request_frees_the_ranks_for_the_next() -> None:
    async with three_nodes() as nodes:
        head = nodes[0]
        await head.ready("halves", tensor(nodes[:2]))
        question, answer = FACTS[0]
        request = pb.GenerateRequest(instance_id="halves", input=ask(question))
        stream = head.remote.stream(head.instances.Generate, request, timeout=60)
        await anext(stream)
        await stream.aclose()
        assert await head.answer("halves", question) == answer


async def test_heads_that_do_not_divide_are_said() -> None:
    async with three_nodes() as nodes:
        await nodes[0].start("thirds", tensor(nodes))
        failed = await nodes[0].until("thirds", runner_pb2.INSTANCE_STATE_FAILED)
        reasons = {shard.error.reason for shard in failed.shards if shard.HasField("error")}
        assert Reason.SHARDING_UNSUPPORTED in reasons


async def test_a_part_of_the_layers_is_no_tensor_rank() -> None:
    async with three_nodes() as nodes:
        placement = tensor(nodes[:2])
        placement.ranks[1].layers.end = LAYERS - 1
        with pytest.raises(ShardringError) as refused:
            await nodes[0].start("halves", placement)
        assert refused.value.metadata["field"] == "placement.ranks[1].layers"
        placement = place(nodes[:2], [4])
        placement.ring_backend = common_pb2.RING_BACKEND_JACCL
        with pytest.raises(ShardringError) as refused:
            await nodes[0].start("jaccl", placement)
        assert refused.value.metadata["field"] == "placement.ring_backend"
