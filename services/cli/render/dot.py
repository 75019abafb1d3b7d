"""The topology as a Graphviz drawing, a ring drawn in."""

from collections.abc import Iterable

from services.cli.text import size
from shardring.placement.v1 import placement_pb2
from shardring.topology.v1 import topology_pb2


def drawn(topology: topology_pb2.Topology, placement: placement_pb2.Placement | None) -> str:
    """Return a graph in the DOT language: a box a node, a line a linked pair, arrows where one
    way is missing; the placement's ranks filled, its hops thick. None: the topology alone."""
    ranks = {rank.node_id: rank for rank in placement.ranks} if placement else {}
    pairs = {(link.source_node_id, link.sink_node_id) for link in topology.links}
    hops = _hops(placement)
    lines = ["digraph shardring {", "  node [shape=box, style=rounded];"]
    for node in topology.nodes:
        text = [node.name, f"{size(node.memory_available_bytes)} available"]
        style = ""
        if rank := ranks.get(node.node_id):
            text.append(f"rank {rank.rank}: layers {rank.layers.start} to {rank.layers.end - 1}")
            style = ', style="rounded,filled", fillcolor=lightblue'
        lines.append(f"  {_quoted(node.node_id)} [label={_quoted(*text)}{style}];")
    for source, sink in sorted(pairs):
        both = (sink, source) in pairs
        if both and source > sink:
            continue
        ends = f"{_quoted(source)} -> {_quoted(sink)}"
        look = ["dir=none"] if both else ["style=dashed"]
        if frozenset((source, sink)) in hops:
            look += ["penwidth=3", "color=blue"]
        lines.append(f"  {ends} [{', '.join(look)}];")
    return "\n".join([*lines, "}", ""])


def _hops(placement: placement_pb2.Placement | None) -> set[frozenset[str]]:
    if placement is None:
        return set()
    ids = [rank.node_id for rank in placement.ranks]
    return {frozenset(pair) for pair in zip(ids, [*ids[1:], ids[0]], strict=True)}


def _quoted(*lines: str) -> str:
    """Return text as DOT takes it: quotes and backslashes escaped, lines joined by its \\n."""
    return '"' + "\\n".join(_escaped(lines)) + '"'


def _escaped(lines: Iterable[str]) -> list[str]:
    return [line.replace("\\", "\\\\").replace('"', '\\"') for line in lines]
