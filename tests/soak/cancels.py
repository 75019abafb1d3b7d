"""Leave thousands of requests half-way: nothing may stay behind, and others go on untouched."""

import asyncio
import json
import random
import time

import click
import grpc

from services.common.errors import Reason, ShardringError
from shardring.runner.v1 import instance_service_pb2 as pb
from shardring.runner.v1 import runner_pb2
from tests.e2e.client import NodeClient
from tests.soak.cluster import MODELS, Cluster, cluster

FACTS = json.loads((MODELS / "shardring" / "tiny-facts" / "facts.json").read_text())
INSTANCE = "cancels"
_AT_ONCE = 64
_REPORTS = 10


async def cancels(count: int) -> bool:
    """Leave so many requests; print what processes hold; say whether all was released."""
    async with cluster() as running:
        placement = await running.client.place(min_node_count=3, request_id=INSTANCE)
        head = running.client.head(placement)
        await head.ready(INSTANCE, placement)
        await _leave_many(head, 200, random.Random(0))
        await _until_idle(head)
        await _show(running, head, "warm")
        before = running.nodes()
        chance = random.Random(1)
        began = time.monotonic()
        witness = asyncio.create_task(_ask_on_and_on(head))
        for _ in range(_REPORTS):
            await _leave_many(head, count // _REPORTS, chance)
            await _show(running, head, f"{time.monotonic() - began:.0f} s")
        witness.cancel()
        await asyncio.wait([witness])
        if not witness.cancelled():
            witness.result()
        await _until_idle(head)
        await _show(running, head, "idle")
        after = running.nodes()
        return all(
            (now.descriptors, now.threads) <= (before[name].descriptors, before[name].threads)
            for name, now in after.items()
        )


async def _leave_many(head: NodeClient, count: int, chance: random.Random) -> None:
    left = iter(range(count))

    async def visitor() -> None:
        for _ in left:
            await _leave_one(head, chance)

    await asyncio.gather(*(visitor() for _ in range(_AT_ONCE)))


async def _leave_one(head: NodeClient, chance: random.Random) -> None:
    """Ask for an endless answer, and go: before it begins, within its prompt, or later."""
    words = " ".join(chance.choices(("gold", "Paris", "moon", "river"), k=chance.choice((2, 90))))
    request = pb.GenerateRequest(
        instance_id=INSTANCE,
        input=runner_pb2.GenerationInput(prompt=words),
        sampling=runner_pb2.Sampling(temperature=5, seed=chance.randrange(2**31)),
        choice_count=chance.choice((1, 1, 1, 3)),
    )
    seconds = chance.random() ** 2 * 0.5
    kind = chance.choice(("cancel", "deadline", "break"))
    call = head.stub.Generate(request, timeout=seconds if kind == "deadline" else None)
    leaving = asyncio.get_running_loop().call_later(seconds, call.cancel)
    try:
        async for _ in call:
            if kind == "break":
                break
    except asyncio.CancelledError:
        if not call.cancelled():
            raise
    except grpc.aio.AioRpcError as error:
        refused = {grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED}
        if error.code() not in refused:
            raise
    finally:
        leaving.cancel()
        call.cancel()


async def _ask_on_and_on(head: NodeClient) -> None:
    """Somebody else's questions are answered right all along."""
    for number in range(10**9):
        fact = FACTS[number % len(FACTS)]
        try:
            answer = await head.answer(INSTANCE, fact["question"])
        except ShardringError as error:
            if error.reason is Reason.QUEUE_FULL:
                await asyncio.sleep(0.1)
                continue
            raise
        if answer != fact["answer"]:
            raise AssertionError(f"{answer!r} instead of {fact['answer']!r}")


async def _instance(head: NodeClient) -> runner_pb2.Instance:
    request = pb.GetInstanceRequest(instance_id=INSTANCE)
    answer = await head.remote.unary(head.stub.GetInstance, request, timeout=10)
    return answer.instance


async def _until_idle(head: NodeClient) -> None:
    async def idle() -> None:
        while (found := await _instance(head)).request_count or any(
            shard.usage.cache_bytes for shard in found.shards
        ):
            await asyncio.sleep(0.1)

    await asyncio.wait_for(idle(), 30)


async def _show(running: Cluster, head: NodeClient, when: str) -> None:
    found = await _instance(head)
    click.echo(f"{when}: {found.request_count} requests")
    for name, now in running.nodes().items():
        click.echo(f"  {name}: {now}")
    for name, process in running.shards().items():
        memory = process.memory_info().rss / 1e6
        click.echo(f"  shard on {name}: {process.num_fds()} descriptors, {memory:.1f} MB")
    for shard in found.shards:
        usage = shard.usage
        click.echo(
            f"  rank {shard.rank}: cache {usage.cache_bytes:,} bytes, "
            f"kept prefixes {usage.prefix_cache_bytes:,}"
        )
