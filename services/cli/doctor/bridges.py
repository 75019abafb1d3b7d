"""Loops of bridged Thunderbolt ports: frames would go round in them for ever."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from shardring.topology.v1 import topology_pb2

Bridge = tuple[str, str]  # node id, bridge name


def bridge_loops(nodes: Sequence[topology_pb2.Node]) -> list[list[Bridge]]:
    """Return the sets of bridges that cables join into a loop, of one node and up.

    A bridge is in a loop if it stays after taking away, again and again, those with a single
    cable. Two cables between two machines are a loop when both are bridged at both ends.
    """
    cables = _bridged_cables(nodes)
    while True:
        ends: dict[Bridge, int] = defaultdict(int)
        for one, other in cables:
            ends[one] += 1
            ends[other] += 1
        kept = [cable for cable in cables if min(ends[cable[0]], ends[cable[1]]) > 1]
        if len(kept) == len(cables):
            return _components(kept)
        cables = kept


def _bridged_cables(nodes: Sequence[topology_pb2.Node]) -> list[tuple[Bridge, Bridge]]:
    """Return the cables both of whose ends are in a bridge, each once."""
    # From each end as it is listed there: (own port, other port) -> the bridges of such ports. A
    # cable counts where both ends tell of it; several ports may go by one name, as on Linux.
    told: dict[tuple[str, str], list[Bridge]] = defaultdict(list)
    for node in nodes:
        for port in node.thunderbolt_ports:
            for peer in port.peer_domain_ids:
                told[port.domain_id, peer].append((node.node_id, port.bridge))
    return [
        (near, far)
        for (own, other), near_ends in sorted(told.items())
        if own < other
        for near, far in zip(near_ends, told.get((other, own), ()), strict=False)
        if near[1] and far[1]
    ]


def _components(cables: Iterable[tuple[Bridge, Bridge]]) -> list[list[Bridge]]:
    groups: list[set[Bridge]] = []
    for cable in cables:
        touched = [group for group in groups if group & set(cable)]
        groups = [group for group in groups if group not in touched]
        groups.append(set(cable).union(*touched))
    return sorted(sorted(group) for group in groups)
