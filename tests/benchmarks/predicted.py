"""Predicted beside measured decode latency, for several placements of one model.

Three nodes of which two get only a part of a core, and calibrate themselves under the same brake.
What is predicted need not be right to the millisecond, but its order has to be the measured one.
"""

import asyncio
import statistics
from collections.abc import Mapping
from contextlib import ExitStack
from itertools import combinations
from pathlib import Path

from shardring.placement.v1 import placement_pb2
from shardring.topology.v1 import topology_pb2
from tests.benchmarks.cluster import Cluster, Instance, cluster
from tests.benchmarks.models import LLAMA, prompt
from tests.benchmarks.report import Bar, Figure, Report, table
from tests.benchmarks.slowed import group

# Cores that each node gets; 0: what it likes.
_CORES = {"ada": 0.0, "bob": 0.5, "cyd": 0.25}
# Layers by node: rings of one, two and three, with the weight on each of the nodes.
_LAYERS: tuple[Mapping[str, int], ...] = (
    {"ada": 12},
    {"ada": 8, "bob": 4},
    {"ada": 8, "bob": 2, "cyd": 2},
    {"bob": 12},
    {"ada": 4, "bob": 4, "cyd": 4},
    {"bob": 6, "cyd": 6},
    {"ada": 1, "bob": 1, "cyd": 10},
)
_ROUNDS = 3
_TOKEN_COUNT = 12
_PROMPT = prompt(4)
_FIGURES_SECONDS = 60.0
# Placements that are predicted to be closer than this are as good as equal.
_CLOSE = 0.05


async def measure(folder: Path, hub: Path) -> Report:
    """Compare the order of all pairs of placements."""
    with ExitStack() as brakes:
        groups = {
            name: brakes.enter_context(group(name, cores))
            for name, cores in _CORES.items()
            if cores
        }
        if None in groups.values():
            shown = table("Predicted: not measured, for no control group can be made here", "")
            return Report([shown])
        async with cluster(folder, hub, *_CORES, calibrate=True) as lab:
            for name, brake in groups.items():
                assert brake is not None
                brake.add(lab.lab.processes[name].pid)
            ids = await _known(lab)
            found = [await _compared(lab, ids, layers) for layers in _LAYERS]
    return _report(found)


async def _known(lab: Cluster) -> dict[str, str]:
    """Wait until all nodes are calibrated and all links measured; return ids by name."""

    def known(topology: topology_pb2.Topology) -> bool:
        measured = [link for link in topology.links if link.HasField("throughput_bytes_per_second")]
        return len(measured) >= len(_CORES) * (len(_CORES) - 1) and all(
            node.weight_bytes_per_second for node in topology.nodes
        )

    async with asyncio.timeout(_FIGURES_SECONDS):
        while not known(topology := await lab.client.topology()):
            await asyncio.sleep(0.5)
    return {node.name: node.node_id for node in topology.nodes}


async def _compared(
    lab: Cluster, ids: Mapping[str, str], layers: Mapping[str, int]
) -> tuple[str, float, float]:
    """Return a placement's name and its predicted and measured milliseconds a token."""
    name = "-".join(f"{node}{count}" for node, count in layers.items())
    placement = await lab.client.place(
        model_id=LLAMA,
        request_id=name,
        layer_counts={ids[node]: count for node, count in layers.items()},
    )
    await lab.client.head(placement).ready(name, placement)
    instance = Instance(lab.client, name, placement, 0.0)
    runs = [await instance.generate(_PROMPT, _TOKEN_COUNT) for _ in range(_ROUNDS)]
    await instance.stop()
    measured = statistics.median(1e3 / run.decode_tokens_per_second for run in runs)
    return name, _predicted(placement), measured


def _predicted(placement: placement_pb2.Placement) -> float:
    return placement.predicted_speed.decode_latency.ToNanoseconds() / 1e6


def _report(found: list[tuple[str, float, float]]) -> Report:
    shown = table("Decode, ms a token", "placement", "predicted", "measured", "ratio")
    for name, predicted, measured in sorted(found, key=lambda row: row[1]):
        row = (f"{predicted:.1f}", f"{measured:.1f}", f"{measured / predicted:.2f}")
        shown.add_row(name, *row)
    pairs = [
        (a, b)
        for (_, *a), (_, *b) in combinations(found, 2)
        if abs(a[0] - b[0]) > _CLOSE * max(a[0], b[0])
    ]
    agreeing = sum((a[0] < b[0]) == (a[1] < b[1]) for a, b in pairs)
    # Kendall's tau: 1 when all pairs are in the same order, -1 when none is.
    tau = (2 * agreeing - len(pairs)) / len(pairs)
    ratios = [measured / predicted for _, predicted, measured in found]
    return Report(
        [shown],
        [
            Figure("predicted.tau", tau, "", Bar(">=", 1.0)),
            Figure("predicted.pairs", len(pairs), "pairs"),
            Figure("predicted.ratio", statistics.median(ratios), "measured / predicted"),
            Figure("predicted.ratio-spread", max(ratios) / min(ratios), "greatest / least"),
        ],
    )
