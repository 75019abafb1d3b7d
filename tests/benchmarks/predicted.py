"""Predicted beside measured decode latency, for several placements of one model.

Three nodes that get only a part of a core each, and calibrate themselves under the same brake; and
hops that are late.
What is predicted need not be right to the millisecond, but its order has to be the measured one.
"""

import asyncio
import statistics
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from itertools import combinations
from pathlib import Path

from services.common.addresses import HostPort, parse_host_port
from shardring.placement.v1 import placement_pb2
from shardring.runner.v1 import runner_pb2
from shardring.topology.v1 import topology_pb2
from tests.benchmarks.cluster import Cluster, Instance, cluster
from tests.benchmarks.models import LLAMA, prompt
from tests.benchmarks.quiet import is_quiet
from tests.benchmarks.report import Bar, Figure, Report, table
from tests.benchmarks.slow_hop import slow_hop
from tests.benchmarks.slowed import Group, group

# Cores that each node gets. None is as fast as it could be: what else the machine does would slow
# just that one.
_CORES = {"ada": 0.6, "bob": 0.3, "cyd": 0.15}
# Layers by node: rings of one, two and three, with the weight on each of the nodes; and by how many
# milliseconds the hop from rank 0 to rank 1 is late.
_PLACEMENTS: tuple[tuple[Mapping[str, int], int], ...] = (
    ({"ada": 12}, 0),
    ({"ada": 8, "bob": 4}, 0),
    ({"ada": 8, "bob": 4}, 250),
    ({"ada": 8, "bob": 2, "cyd": 2}, 20),
    ({"ada": 4, "bob": 4, "cyd": 4}, 0),
    ({"bob": 6, "cyd": 6}, 0),
    ({"ada": 1, "bob": 1, "cyd": 10}, 0),
)
_ROUNDS = 2
_TOKEN_COUNT = 12
_PROMPT = prompt(4)
# Another address of this machine, where the late way of a hop begins.
_LATE = "127.0.0.2"
_FIGURES_SECONDS = 60.0
# Placements that are predicted to be closer than this are as good as equal.
_CLOSE = 0.05


async def measure(folder: Path, hub: Path) -> Report:
    """Compare the order of all pairs of placements."""
    with ExitStack() as brakes:
        made = {name: brakes.enter_context(group(name, n)) for name, n in _CORES.items()}
        groups = {name: one for name, one in made.items() if one is not None}
        if len(groups) < len(_CORES):
            shown = table("Predicted: not measured, for no control group can be made here", "")
            return Report([shown])
        async with cluster(
            folder,
            hub,
            *_CORES,
            calibrate=True,
            on_start=lambda name, pid: groups[name].add(pid),
        ) as lab:
            ids = await _known(lab)
            brakes_of = list(groups.values())
            quiet = await is_quiet()
            found = [
                await _compared(lab, ids, layers, late, brakes_of) for layers, late in _PLACEMENTS
            ]
            quiet = await is_quiet() and quiet
    return _report(found, disturbed=not quiet)


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
    lab: Cluster,
    ids: Mapping[str, str],
    layers: Mapping[str, int],
    late: int,
    groups: Sequence[Group],
) -> tuple[str, float, float]:
    """Return a placement's name and its predicted and measured milliseconds a token."""
    name = "-".join(f"{node}{count}" for node, count in layers.items())
    name += f"-{late}ms" if late else ""
    placement = await lab.client.place(
        model_id=LLAMA,
        request_id=name,
        layer_counts={ids[node]: count for node, count in layers.items()},
    )
    # A link that is late both ways has a round trip twice as much longer, of which half counts.
    predicted = placement.predicted_speed.decode_latency.ToNanoseconds() / 1e6 + late
    head = lab.client.head(placement)
    way = _detour(placement) if late else None
    # Nobody waits for slow starts.
    for one in groups:
        one.brake(on=False)
    await head.start(name, placement)
    async with AsyncExitStack() as ways:
        if way is not None:
            # From now on: when it started the node saw to it that the port was free.
            await ways.enter_async_context(slow_hop(*way, late / 1e3))
        await head.until(name, runner_pb2.INSTANCE_STATE_READY)
        for one in groups:
            one.brake(on=True)
        instance = Instance(lab.client, name, placement, 0.0)
        runs = [await instance.generate(_PROMPT, _TOKEN_COUNT) for _ in range(_ROUNDS)]
        await instance.stop()
    measured = statistics.median(1e3 / run.decode_tokens_per_second for run in runs)
    return name, predicted, measured


def _detour(placement: placement_pb2.Placement) -> tuple[HostPort, HostPort]:
    """Have rank 0 reach rank 1 at another address; return that, and where rank 1 listens."""
    first, second = placement.ranks[0], placement.ranks[1]
    port = parse_host_port(second.hosts[1]).port
    listen, sink = HostPort(_LATE, port), HostPort("127.0.0.1", port)
    first.hosts[1], second.hosts[1] = str(listen), str(sink)
    return listen, sink


def _report(found: list[tuple[str, float, float]], *, disturbed: bool) -> Report:
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
            Figure("predicted.tau", tau, "", Bar(">=", 1.0), disturbed),
            Figure("predicted.pairs", len(pairs), "pairs"),
            Figure(
                "predicted.ratio",
                statistics.median(ratios),
                "measured / predicted",
                None,
                disturbed,
            ),
            Figure("predicted.ratio-spread", max(ratios) / min(ratios), "greatest / least"),
        ],
    )
