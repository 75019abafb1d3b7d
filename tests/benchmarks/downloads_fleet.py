"""What many nodes that fetch models cost the downloads service, over real gRPC.

Three processes: the service, `tests.benchmarks.workers` with all workers, and this one.
"""

import asyncio
import time
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from services.common.addresses import parse_host_port
from services.common.channel import Remote
from shardring.downloads.v1 import downloads_pb2
from shardring.downloads.v1 import downloads_service_pb2 as pb
from shardring.downloads.v1.downloads_service_pb2_grpc import DownloadsServiceStub
from tests.benchmarks.quiet import is_quiet, until_quiet
from tests.benchmarks.report import Bar, Figure, Report, table
from tests.benchmarks.serving import cpu_percent, module
from tests.benchmarks.workers import DOWNLOADS_EACH, FILES_EACH

CPU_BAR = Bar("<", 20.0)
SIZES = (16, 64, 256)
_SERVICE = ("services.downloads", "--listen", "127.0.0.1:0", "--log-level", "warning")
_QUIET_SECONDS = 20.0
_CPU_SECONDS = 30.0


@dataclass(frozen=True)
class Load:
    """What was measured with so many nodes."""

    node_count: int
    reports_per_second: float
    cpu_percent: float
    memory_mb: float
    # Whether the machine had anything else to do before or after.
    disturbed: bool = False


async def measure(folder: Path, hub: Path) -> Report:
    """Measure every size; the bar is for all of them."""
    loads = [await _measure(node_count) for node_count in SIZES]
    shown = table(
        f"Downloads service, each node with {DOWNLOADS_EACH} downloads of {FILES_EACH} files",
        "nodes",
        "reports a second",
        "each download every, s",
        "% of a core",
        "memory, MB",
    )
    figures = []
    for load in loads:
        live_count = load.node_count * DOWNLOADS_EACH
        shown.add_row(
            f"{load.node_count}{', disturbed' if load.disturbed else ''}",
            f"{load.reports_per_second:.0f}",
            f"{live_count / load.reports_per_second:.2f}",
            f"{load.cpu_percent:.1f}",
            f"{load.memory_mb:.0f}",
        )
        name = f"downloads_fleet.{load.node_count}"
        figures += [
            Figure(f"{name}.cpu", load.cpu_percent, "% of a core", CPU_BAR, load.disturbed),
            Figure(f"{name}.reports", load.reports_per_second, "1/s"),
            Figure(f"{name}.memory", load.memory_mb, "MB"),
        ]
    return Report([shown], figures)


async def _measure(node_count: int) -> Load:
    quiet = await until_quiet(_QUIET_SECONDS)
    load = await _measure_now(node_count)
    return replace(load, disturbed=not (quiet and await is_quiet()))


async def _measure_now(node_count: int) -> Load:
    async with module(*_SERVICE) as (service, line):
        address = parse_host_port(line.split()[-1])
        workers = ("tests.benchmarks.workers", str(address), str(node_count))
        async with module(*workers) as (_, said):
            assert said == "settled", said
            process = psutil.Process(service.pid)
            remote = Remote("downloads", [address])
            before = await _seen(remote)
            began = time.perf_counter()
            cpu = await cpu_percent(process, _CPU_SECONDS)
            after = await _seen(remote)
            reports = (after.revision - before.revision) / (time.perf_counter() - began)
            _check(before, after, node_count)
            await remote.close()
            return Load(node_count, reports, cpu, process.memory_info().rss / 1e6)


async def _seen(remote: Remote) -> pb.WatchDownloadsResponse:
    """Return all downloads as a new watcher is told of them."""
    stub = DownloadsServiceStub(remote.channel)
    watch = remote.stream(stub.WatchDownloads, pb.WatchDownloadsRequest())
    async with asyncio.timeout(30), aclosing(watch) as messages:
        return await anext(messages)


def _check(
    before: pb.WatchDownloadsResponse, after: pb.WatchDownloadsResponse, node_count: int
) -> None:
    """Assert that every download was there, and went on."""
    done = {download.download_id: download.downloaded_bytes for download in before.downloads}
    assert len(done) == node_count * DOWNLOADS_EACH, len(done)
    for download in after.downloads:
        assert download.state == downloads_pb2.DOWNLOAD_STATE_ONGOING
        assert download.downloaded_bytes > done[download.download_id]
