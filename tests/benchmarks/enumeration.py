"""The established way to place, beside which the search is: list every simple cycle, and score."""

from collections.abc import Sequence
from itertools import pairwise

import networkx as nx

from services.placement.domain.model import Model
from services.placement.domain.rings import canonical
from tests.benchmarks.clusters import Case

Score = tuple[bool, int, int, int, int, Sequence[str]]


def enumerate_rings(case: Case, model: Model) -> tuple[int, Sequence[str]]:
    """Return the number of cycles, and the best ring by every rule that the search goes by.

    Each node's and link's figures are looked up once, and the filters come cheapest first. What a
    ring's nodes can share of the layers is not looked at: in the clusters here there is always a
    way where the sum suffices and each node can hold its part.
    """
    candidates, nodes = case.candidates, case.cluster.nodes
    memory, downloads = candidates.memory_bytes, candidates.download_scores
    layers = {node_id: model.most_layers(memory[node_id]) for node_id in nodes}
    graph = nx.DiGraph()
    graph.add_nodes_from(nodes)
    graph.add_edges_from(case.cluster.best_links)
    hops = {(a, b): hop for a, b, hop in candidates.graph.edges.data("hop")}
    hops |= {(b, a): hop for (a, b), hop in hops.items()}
    able = {node_id for node_id, node in nodes.items() if node.backends}
    leaves = {node_id for node_id in nodes if graph.out_degree(node_id) <= 1}
    best: tuple[int, Score] | None = None
    count = 0
    for cycle in ([[node_id] for node_id in nodes], nx.simple_cycles(graph)):
        for ring in cycle:
            count += 1
            pairs = list(pairwise([*ring, ring[0]])) if len(ring) > 2 else list(pairwise(ring))
            if (
                len(ring) > model.layer_count
                or not all(node_id in able for node_id in ring)
                or not all(pair in hops for pair in pairs)
                or sum(memory[node_id] for node_id in ring) < model.needed_bytes
                or sum(layers[node_id] for node_id in ring) < model.layer_count
            ):
                continue
            each = [hops[pair] for pair in pairs]
            score = (
                leaves.isdisjoint(ring),
                -sum(downloads[node_id] for node_id in ring),
                -sum(memory[node_id] for node_id in ring),
                max(each, default=0),
                sum(each),
                _in_order(ring),
            )
            if best is None or (len(ring), score) < best:
                best = (len(ring), score)
    assert best is not None
    return count, best[1][-1]


def _in_order(ring: Sequence[str]) -> Sequence[str]:
    """Return a ring from its smallest node on, towards the smaller of that one's neighbours."""
    if len(ring) < 3:
        return sorted(ring)
    ids = sorted(ring)
    return [ids[i] for i in canonical([ids.index(node_id) for node_id in ring])]
