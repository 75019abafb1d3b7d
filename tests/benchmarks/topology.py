"""How the topology service grows: simulated nodes at their normal pace, over real gRPC.

Three processes: the service, `tests.benchmarks.mesh` with all nodes, and this one, which asks and
watches.
"""

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from services.common.addresses import parse_host_port
from tests.benchmarks.mesh import node_of
from tests.benchmarks.quiet import is_quiet, until_quiet
from tests.benchmarks.report import Bar, Figure, Report, table
from tests.benchmarks.serving import cpu_percent, module
from tests.contract.topology_lab import Client

CPU_BAR = Bar("<", 50.0)
COLD_BAR = Bar("<", 150.0)
UNCHANGED_BAR = Bar("<", 5.0)
WATCH_BAR = Bar("<", 1.0)
# (nodes, links each): none, for what a call costs at least; full meshes; and one sparse cluster.
SIZES = ((0, 0), (16, 15), (64, 63), (256, 255), (1_000, 12))
BARRED = ((256, 255), (1_000, 12))
WATCHERS = 100
_QUIET_SECONDS = 20.0
_CPU_SECONDS = 30.0
_COLD_CALLS, _UNCHANGED_CALLS, _CHANGES = 200, 2_000, 10


@dataclass(frozen=True)
class Growth:
    """What was measured at one size."""

    node_count: int
    link_count: int
    settle_seconds: float
    cpu_percent: float
    memory_mb: float
    cold_ms: Sequence[float]
    unchanged_ms: Sequence[float]
    watch_seconds: Sequence[float]
    # Whether the machine had anything else to do before or after.
    disturbed: bool = False


async def measure(folder: Path, hub: Path) -> Report:
    """Measure every size; bars are for the two large ones."""
    found = [await _measure(*size) for size in SIZES]
    shown = table(
        f"Topology service, heartbeats every 3 s, {WATCHERS} watchers",
        "nodes",
        "links",
        "settled after, s",
        "% of a core",
        "memory, MB",
        "all of it, p50 / p99 ms",
        "unchanged, p50 / p99 ms",
        "change seen by all, worst s",
    )
    figures = []
    for size, growth in zip(SIZES, found, strict=True):
        cold, unchanged = _percentile(growth.cold_ms, 99), _percentile(growth.unchanged_ms, 99)
        shown.add_row(
            f"{growth.node_count}{', disturbed' if growth.disturbed else ''}",
            f"{growth.link_count:,}",
            f"{growth.settle_seconds:.1f}",
            f"{growth.cpu_percent:.1f}",
            f"{growth.memory_mb:.0f}",
            f"{statistics.median(growth.cold_ms):.1f} / {cold:.1f}",
            f"{statistics.median(growth.unchanged_ms):.2f} / {unchanged:.2f}",
            f"{max(growth.watch_seconds):.3f}",
        )
        name = f"topology.{growth.node_count}"
        barred = size in BARRED
        figures += [
            Figure(f"{name}.cpu", growth.cpu_percent, "% of a core", CPU_BAR if barred else None),
            Figure(f"{name}.cold_p99", cold, "ms", COLD_BAR if barred else None),
            Figure(f"{name}.unchanged_p99", unchanged, "ms", UNCHANGED_BAR if barred else None),
            Figure(
                f"{name}.watch_worst",
                max(growth.watch_seconds),
                "s",
                WATCH_BAR if barred else None,
            ),
            Figure(f"{name}.memory", growth.memory_mb, "MB"),
        ]
    return Report([shown], figures)


async def _measure(node_count: int, links_each: int) -> Growth:
    quiet = await until_quiet(_QUIET_SECONDS)
    growth = await _measure_now(node_count, links_each)
    return replace(growth, disturbed=not (quiet and await is_quiet()))


async def _measure_now(node_count: int, links_each: int) -> Growth:
    async with module("services.topology", "--listen", "127.0.0.1:0") as (service, line):
        address = parse_host_port(line.split()[-1])
        began = time.perf_counter()
        mesh = ("tests.benchmarks.mesh", str(address), str(node_count), str(links_each))
        async with module(*mesh) as (_, said):
            assert said == "settled", said
            process = psutil.Process(service.pid)
            client = Client(address)
            link_count = node_count * links_each
            async with asyncio.timeout(30):
                while len((first := (await client.get()).topology).links) < link_count:
                    await asyncio.sleep(0.2)
            settled = time.perf_counter() - began
            assert len(first.nodes) == node_count, len(first.nodes)
            assert not any(link.one_way for link in first.links)
            cpu = await cpu_percent(process, _CPU_SECONDS)
            memory = process.memory_info().rss / 1e6
            cold = [await _timed(client, None) for _ in range(_COLD_CALLS)]
            unchanged = await _unchanged(client)
            watch = await _watched_changes(client)
            await client.remote.close()
    return Growth(node_count, link_count, settled, cpu, memory, cold, unchanged, watch)


async def _timed(client: Client, known: int | None) -> float:
    """Return how many milliseconds a call takes; calls come at any moment of the load."""
    await asyncio.sleep(0.013)
    began = time.perf_counter()
    await client.get(known)
    return (time.perf_counter() - began) * 1e3


async def _unchanged(client: Client) -> list[float]:
    revision = (await client.get()).revision
    took = [await _timed(client, revision) for _ in range(_UNCHANGED_CALLS)]
    # Had anything changed meanwhile, the figures would mean nothing.
    assert (await client.get(revision)).unchanged
    return took


async def _watched_changes(client: Client) -> list[float]:
    """Return how many seconds each of some changes took to reach all of the watchers."""
    seen = [0] * WATCHERS
    moved = asyncio.Condition()

    async def follow(index: int) -> None:
        own = Client(client.address)
        try:
            async with own.watch() as responses:
                async for response in responses:
                    async with moved:
                        seen[index] = response.revision
                        moved.notify_all()
        finally:
            await own.remote.close()

    async def all_at(revision: int) -> None:
        async with moved:
            await moved.wait_for(lambda: min(seen) >= revision)

    watchers = [asyncio.create_task(follow(index)) for index in range(WATCHERS)]
    took = []
    try:
        await all_at(1)
        extra = node_of(60_000)
        for number in range(_CHANGES):
            extra.name = f"renamed-{number}"
            began = time.perf_counter()
            await all_at((await client.report_node(extra)).revision)
            took.append(time.perf_counter() - began)
    finally:
        for task in watchers:
            task.cancel()
        await asyncio.wait(watchers)
    return took


def _percentile(values: Sequence[float], percent: int) -> float:
    """Return the value that this many of a hundred do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]
