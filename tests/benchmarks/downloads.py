"""How fast models get onto nodes: beside huggingface_hub alone, and onto several nodes at once.

All over loopback, each node, service and hub a process of its own. What is fetched is in the page
cache of the hub's machine, and what was written before is on disk when a round begins.
"""

import asyncio
import contextlib
import json
import os
import shutil
import statistics
import sys
import time
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import click
import psutil

from services.cli.lab import Lab, LabProcess
from services.common.addresses import parse_host_port
from services.common.channel import Remote
from shardring.downloads.v1 import downloads_pb2
from shardring.downloads.v1 import downloads_service_pb2 as pb
from shardring.downloads.v1.downloads_service_pb2_grpc import DownloadsServiceStub
from tests.benchmarks.measure import spread
from tests.benchmarks.quiet import is_quiet, until_quiet
from tests.benchmarks.report import Bar, Figure, Report, table
from tests.benchmarks.weights import FILE_COUNT, write_random_model
from tests.e2e.client import Client
from tests.fakes.faulty_hub import COUNTS_PATH

SPEED_BAR = Bar(">=", 0.95)
CPU_BAR = Bar("<", 3.0)
SPREAD_BAR = Bar("<", 1.2)
MODEL = "random/weights"
LARGE_BYTES = 4_000_000_000
SMALL_BYTES = 1_000_000_000
HUB_BYTES_PER_SECOND = 50_000_000
NODES = ("ada", "bob", "cyd")
_ROUNDS = 5
_QUIET_SECONDS = 15.0
_LIMIT_SECONDS = 300.0
_ENVIRONMENT = {
    "OTEL_EXPORTER_OTLP_ENDPOINT": "",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}


@dataclass(frozen=True)
class Fetched:
    """One download on one node; the processor time is of its worker, without the fetching child,
    and of the service."""

    seconds: float
    cpu_percent: float = 0.0


@dataclass(frozen=True)
class Spreading:
    """One model on one or more nodes: when the last had it, and what the hub sent in all."""

    seconds: float
    sent_bytes: int
    disturbed: bool


async def measure(folder: Path, hub: Path) -> Report:
    """Measure both."""
    await asyncio.to_thread(folder.mkdir, parents=True)
    room = shutil.disk_usage(folder).free
    if room < 4 * LARGE_BYTES:
        raise click.ClickException(f"{folder} has too little room: {room / 1e9:.0f} GB.")
    alone = await _beside_huggingface_hub(folder / "speed")
    shared = await _onto_three(folder / "spread")
    return Report(alone.tables + shared.tables, alone.figures + shared.figures)


async def _beside_huggingface_hub(folder: Path) -> Report:
    """Fetch a large model in turns, each side being first in every other round."""
    served = folder / "served"
    await asyncio.to_thread(write_random_model, served / MODEL, LARGE_BYTES)
    ours, theirs, disturbed = [], [], False
    lab = Lab(folder / "lab", environment=_ENVIRONMENT)
    try:
        await lab.start_control(served)
        node = await lab.start_node("ada")
        node_id = (await _node_ids(lab, "ada"))[0]
        endpoint = f"http://{lab.address('hub')}"
        # The hub knows its model by its hashes, which it makes when it is first asked.
        await _get(f"{endpoint}/api/models/{MODEL}", seconds=120)
        async with _client(lab) as client:
            for number in range(_ROUNDS):
                sides = ["ours", "theirs"] if number % 2 else ["theirs", "ours"]
                for side in sides:
                    quiet = await until_quiet(_QUIET_SECONDS)
                    if side == "ours":
                        ours.append(await _ours(client, lab, node, node_id))
                    else:
                        theirs.append(await _theirs(endpoint, folder / "cache"))
                    await asyncio.to_thread(os.sync)
                    disturbed |= not (quiet and await is_quiet())
    finally:
        await lab.stop()
        await asyncio.to_thread(shutil.rmtree, folder)
    megabytes = LARGE_BYTES / 1e6
    shown = table(
        f"{LARGE_BYTES / 1e9:.0f} GB in {FILE_COUNT} files from a hub on loopback: median (least "
        f"to greatest) of {_ROUNDS} {'disturbed ' if disturbed else ''}rounds",
        "",
        "seconds",
        "MB/s",
        "progress, % of a core",
    )
    cpu = spread([fetched.cpu_percent for fetched in ours])
    for label, sides_runs in (("Shardring", ours), ("huggingface_hub", theirs)):
        seconds = spread([fetched.seconds for fetched in sides_runs])
        speed = spread([megabytes / fetched.seconds for fetched in sides_runs])
        shown.add_row(
            label, f"{seconds:.2f}", f"{speed:.0f}", f"{cpu:.1f}" if sides_runs is ours else ""
        )
    ratio = spread([b.seconds / a.seconds for a, b in zip(ours, theirs, strict=True)])
    shown.add_row("ratio of each round", "", f"{ratio:.3f}", "")
    name = "downloads.speed"
    return Report(
        [shown],
        [
            Figure(
                f"{name}.ratio", ratio.median, "of huggingface_hub's speed", SPEED_BAR, disturbed
            ),
            Figure(f"{name}.progress", cpu.median, "% of a core", CPU_BAR, disturbed),
            Figure(
                f"{name}.rate",
                statistics.median(megabytes / fetched.seconds for fetched in ours),
                "MB/s",
            ),
        ],
    )


async def _ours(client: Remote, lab: Lab, node: LabProcess, node_id: str) -> Fetched:
    processes = [psutil.Process(pid) for pid in (node.pid, lab.processes["downloads"].pid)]
    before = sum(_cpu_seconds(process) for process in processes)
    seconds = await _fetch(client, node_id)
    after = sum(_cpu_seconds(process) for process in processes)
    stub = DownloadsServiceStub(client.channel)
    request = pb.DeleteModelRequest(node_id=node_id, model_id=MODEL)
    await client.unary(stub.DeleteModel, request, timeout=60)
    return Fetched(seconds, (after - before) / seconds * 100)


async def _theirs(endpoint: str, cache: Path) -> Fetched:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.benchmarks.snapshot", MODEL, endpoint, str(cache)),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, **_ENVIRONMENT, "HF_HUB_OFFLINE": "0"},
    )
    said, _ = await process.communicate()
    await asyncio.to_thread(shutil.rmtree, cache)
    return Fetched(float(said))


async def _onto_three(folder: Path) -> Report:
    """Fetch a model from a slow hub onto one node, then onto three fresh ones at once."""
    served = folder / "served"
    await asyncio.to_thread(write_random_model, served / MODEL, SMALL_BYTES)
    found: list[tuple[int, Spreading]] = []
    try:
        for names in (NODES[:1], NODES):
            place = folder / f"lab-{len(names)}"
            found.append((len(names), await _onto(place, served, names)))
    finally:
        await asyncio.to_thread(shutil.rmtree, folder)
    shown = table(
        f"{SMALL_BYTES / 1e9:.0f} GB in {FILE_COUNT} files from a hub with "
        f"{HUB_BYTES_PER_SECOND / 1e6:.0f} MB/s",
        "nodes",
        "all have it after, s",
        "the hub sent, times",
    )
    for count, spreading in found:
        shown.add_row(
            f"{count}{', disturbed' if spreading.disturbed else ''}",
            f"{spreading.seconds:.1f}",
            f"{spreading.sent_bytes / SMALL_BYTES:.3f}",
        )
    (_, one), (_, three) = found
    ratio = three.seconds / one.seconds
    disturbed = one.disturbed or three.disturbed
    return Report(
        [shown],
        [
            Figure("downloads.three.ratio", ratio, "of one node's time", SPREAD_BAR, disturbed),
            Figure("downloads.three.sent", three.sent_bytes / SMALL_BYTES, "times the model"),
        ],
    )


async def _onto(folder: Path, served: Path, names: tuple[str, ...]) -> Spreading:
    """Have all nodes, which are fresh, fetch the model at the same moment."""
    lab = Lab(folder, environment=_ENVIRONMENT)
    async with _slow_hub(served, folder) as hub:
        try:
            await lab.start_control(served)
            # Nodes are told of this one as the hub.
            lab.processes["fast hub"] = lab.processes.pop("hub")
            lab.processes["hub"] = hub
            for name in names:
                await lab.start_node(name)
            node_ids = await _node_ids(lab, *names)
            await _get(f"http://{hub.address}/api/models/{MODEL}", seconds=120)
            quiet = await until_quiet(_QUIET_SECONDS)
            began = time.perf_counter()
            async with _client(lab) as client:
                await asyncio.gather(*(_fetch(client, node_id) for node_id in node_ids))
            seconds = time.perf_counter() - began
            quiet &= await is_quiet()
            counts = json.loads(await _get(f"http://{hub.address}{COUNTS_PATH}"))
        finally:
            await lab.stop()
            await asyncio.to_thread(shutil.rmtree, folder)
    return Spreading(seconds, sum(counts["sent_bytes"].values()), not quiet)


async def _node_ids(lab: Lab, *names: str) -> list[str]:
    client = Client(lab)
    try:
        return await client.node_ids(*names)
    finally:
        await client.close()


async def _fetch(client: Remote, node_id: str) -> float:
    """Have a node fetch the whole model; return how many seconds it takes, as a watcher sees."""
    began = time.perf_counter()
    stub = DownloadsServiceStub(client.channel)
    request = pb.StartDownloadRequest(node_id=node_id, model_id=MODEL)
    download = (await client.unary(stub.StartDownload, request, timeout=10)).download
    watch = pb.WatchDownloadsRequest(download_ids=[download.download_id])
    async for message in client.stream(stub.WatchDownloads, watch, timeout=_LIMIT_SECONDS):
        for seen in message.downloads:
            if seen.state == downloads_pb2.DOWNLOAD_STATE_COMPLETED:
                return time.perf_counter() - began
            if seen.state == downloads_pb2.DOWNLOAD_STATE_FAILED:
                raise click.ClickException(f"A download failed: {seen.error.message}")
    raise click.ClickException("The downloads service hung up.")


@asynccontextmanager
async def _client(lab: Lab) -> AsyncIterator[Remote]:
    remote = Remote("downloads", [lab.address("downloads")])
    try:
        yield remote
    finally:
        await remote.close()


@asynccontextmanager
async def _slow_hub(served: Path, folder: Path) -> AsyncIterator[LabProcess]:
    arguments = (str(served), str(HUB_BYTES_PER_SECOND))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.fakes.faulty_hub", *arguments),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(60):
            line = (await process.stdout.readline()).decode()
        address = parse_host_port(line.split()[-1])
        yield LabProcess("hub", process, address, folder / "hub.log", arguments, {})
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


async def _get(url: str, seconds: float = 10) -> bytes:
    def get() -> bytes:
        with urllib.request.urlopen(url, timeout=seconds) as answer:
            return bytes(answer.read())

    return await asyncio.to_thread(get)


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
