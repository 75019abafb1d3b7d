"""Generating over gRPC, measured as a client sees it."""

import asyncio
import time
from contextlib import aclosing

from services.common.channel import Remote
from shardring.runner.v1 import instance_service_pb2, runner_pb2
from shardring.runner.v1.instance_service_pb2_grpc import InstanceServiceStub
from tests.benchmarks.measure import Arrivals, Run, run_of

_SECONDS = 300


async def generate_all(
    head: Remote, instance_id: str, prompts: list[list[int]], token_count: int
) -> Run:
    """Generate `token_count` tokens from each prompt at temperature 0, all streams at once."""
    began = time.perf_counter()
    streams = [_stream(head, instance_id, prompt, token_count) for prompt in prompts]
    done = await asyncio.gather(*streams)
    return run_of(began, [tokens for tokens, _ in done], [seen for _, seen in done])


async def _stream(
    head: Remote, instance_id: str, prompt: list[int], token_count: int
) -> tuple[list[int], Arrivals]:
    request = instance_service_pb2.GenerateRequest(
        instance_id=instance_id,
        input=runner_pb2.GenerationInput(token_ids=runner_pb2.TokenIds(ids=prompt)),
        max_token_count=token_count,
    )
    tokens: list[int] = []
    arrivals: Arrivals = []
    stream = head.stream(InstanceServiceStub(head.channel).Generate, request, timeout=_SECONDS)
    async with aclosing(stream):
        async for message in stream:
            if message.token_ids:
                tokens += message.token_ids
                arrivals.append((time.perf_counter(), len(tokens)))
    return tokens, arrivals
