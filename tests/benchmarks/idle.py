"""What a cluster costs while nobody asks it anything: three services, three nodes, three ranks."""

import asyncio
from pathlib import Path

import psutil

from tests.benchmarks.cluster import cluster
from tests.benchmarks.models import TINY_FACTS
from tests.benchmarks.report import Bar, Figure, Report, table

BAR = Bar("<", 2.0)
# Of the three ranks' processes together.
INSTANCE_BAR = Bar("<", 1.0)
_NODES = ("ada", "bob", "cyd")
# What starting has left to do is over by then.
_SETTLE_SECONDS = 5.0
_SECONDS = 40.0


async def measure(folder: Path, hub: Path) -> Report:
    """Measure the processor time of all processes with a READY three-rank instance."""
    async with cluster(folder, hub, *_NODES) as lab:
        await lab.start(TINY_FACTS, len(_NODES))
        await lab.client.close()
        await asyncio.sleep(_SETTLE_SECONDS)
        processes: dict[str, psutil.Process] = {}
        for name, entry in lab.lab.processes.items():
            processes[name] = psutil.Process(entry.pid)
            for child in processes[name].children(recursive=True):
                processes[f"{name}'s shard"] = child
        before = {name: _seconds(process) for name, process in processes.items()}
        await asyncio.sleep(_SECONDS)
        shares = {
            name: (_seconds(process) - before[name]) / _SECONDS * 100
            for name, process in processes.items()
        }
    total = sum(shares.values())
    shown = table(f"Idle for {_SECONDS:.0f} s", "process", "% of a core")
    for name, share in shares.items():
        shown.add_row(name, f"{share:.2f}")
    shown.add_row("all", f"{total:.2f}")
    instance = sum(share for name, share in shares.items() if name.endswith("'s shard"))
    figures = [
        Figure("idle", total, "% of a core", BAR),
        Figure("idle.instance", instance, "% of a core", INSTANCE_BAR),
    ]
    return Report([shown], figures)


def _seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
