"""How many tokens a second the way from a shard's process to gRPC clients carries.

Fed by a child that emits tokens as fast as its parent takes them (`fast_child`), through the real
socket, runner and server, to gRPC clients in this process. So whatever it carries beyond what a
ring computes is never what limits the ring.
"""

import asyncio
import os
import statistics
import time
from collections.abc import AsyncIterable
from dataclasses import dataclass
from pathlib import Path

import grpc
import psutil

from shardring.runner.v1 import instance_service_pb2, runner_pb2
from shardring.runner.v1.instance_service_pb2_grpc import InstanceServiceStub
from tests.benchmarks.measure import spread
from tests.benchmarks.models import TINY_FACTS
from tests.benchmarks.quiet import until_quiet
from tests.benchmarks.report import Bar, Figure, Report, table
from tests.benchmarks.runners import INSTANCE_ID, running

# By number of streams: the least tokens per second of all together, and tokens of each.
_CASES = {1: (Bar(">=", 5_000), 50_000), 50: (Bar(">=", 20_000), 3_000)}
_ROUNDS = 3
_WAIT_SECONDS = 15.0
# A pace that no ring of these machines reaches, and how many tokens are looked at.
_PACE, _PACED_COUNT = 500, 1_500


@dataclass(frozen=True)
class _Seen:
    """What clients saw of some streams at once, and what processes took of a core meanwhile."""

    tokens_per_second: float
    tokens_per_message: float
    first_token_seconds: float
    shares: list[float]


async def measure(folder: Path, hub: Path) -> Report:
    """Measure one stream, then many."""
    report = Report()
    shown = table(
        f"The serving path: median (least to greatest) of {_ROUNDS} rounds",
        "streams",
        "tokens/s",
        "tokens a message",
        "slowest first token, s",
        "% of a core: node, shard, clients",
    )
    async with running(hub / TINY_FACTS, [0, 8], "tests.benchmarks.fast_child") as ring:
        node = ring.processes[0]
        processes = [node, *node.children(), psutil.Process(os.getpid())]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{ring.port}") as channel:
            await _run(channel, processes, 1, 1_000)
            for streams, (bar, token_count) in _CASES.items():
                rounds, disturbed = [], False
                for _ in range(_ROUNDS):
                    disturbed |= not await until_quiet(_WAIT_SECONDS)
                    rounds.append(await _run(channel, processes, streams, token_count))
                rate = spread([one.tokens_per_second for one in rounds])
                first = spread([one.first_token_seconds for one in rounds])
                shown.add_row(
                    str(streams),
                    f"{rate:,.0f}",
                    f"{spread([one.tokens_per_message for one in rounds]):.1f}",
                    f"{first:.3f}",
                    _median_shares(rounds),
                )
                name = f"serving.{streams}"
                report.figures.append(Figure(name, rate.median, "tokens/s", bar, disturbed))
                report.figures.append(Figure(f"{name}.first_token", first.median, "s"))
            report.figures.extend(await _paced(channel, node))
    report.tables.append(shown)
    return report


def _median_shares(rounds: list[_Seen]) -> str:
    by_process = zip(*(one.shares for one in rounds), strict=True)
    return ", ".join(f"{statistics.median(shares):.0f}" for shares in by_process)


async def _paced(channel: grpc.aio.Channel, node: psutil.Process) -> list[Figure]:
    """Return what one stream at a usual pace sees of each token, and what it costs the node."""
    delays: list[float] = []
    messages = 0
    before = _seconds(node)
    async for message in _call(channel, _PACED_COUNT, _PACE):
        now = time.monotonic()
        delays += [now - float(sent) for sent in message.text.split()]
        messages += bool(message.token_ids)
    cost = _seconds(node) - before
    cuts = statistics.quantiles(delays, n=100)
    return [
        Figure("serving.paced.delay_p50", cuts[49] * 1000, "ms"),
        Figure("serving.paced.delay_p99", cuts[98] * 1000, "ms"),
        Figure("serving.paced.message", _PACED_COUNT / messages, "tokens"),
        Figure("serving.paced.node", cost / _PACED_COUNT * 1000, "ms of the node a token"),
    ]


def _call(
    channel: grpc.aio.Channel, token_count: int, pace: int
) -> AsyncIterable[instance_service_pb2.GenerateResponse]:
    request = instance_service_pb2.GenerateRequest(
        instance_id=INSTANCE_ID,
        input=runner_pb2.GenerationInput(token_ids=runner_pb2.TokenIds(ids=[6, 7, 8])),
        sampling=runner_pb2.Sampling(seed=pace),
        max_token_count=token_count,
    )
    return InstanceServiceStub(channel).Generate(request, timeout=120)


async def _run(
    channel: grpc.aio.Channel, processes: list[psutil.Process], streams: int, token_count: int
) -> _Seen:
    async def stream() -> tuple[float, float, int]:
        messages = came = 0
        first = 0.0
        async for message in _call(channel, token_count, 0):
            if message.token_ids:
                first = first or time.perf_counter()
                came += len(message.token_ids)
                messages += 1
        if came != token_count:
            raise RuntimeError(f"{came} of {token_count} tokens came")
        return first, time.perf_counter(), messages

    before = [_seconds(process) for process in processes]
    began = time.perf_counter()
    seen = await asyncio.gather(*(stream() for _ in range(streams)))
    ended = max(end for _, end, _ in seen)
    after = [_seconds(process) for process in processes]
    return _Seen(
        tokens_per_second=streams * token_count / (ended - began),
        tokens_per_message=streams * token_count / sum(messages for *_, messages in seen),
        first_token_seconds=max(first for first, *_ in seen) - began,
        shares=[(b - a) / (ended - began) * 100 for a, b in zip(before, after, strict=True)],
    )


def _seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
