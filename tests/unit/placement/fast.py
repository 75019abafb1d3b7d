"""Calibrated clusters with measured links, any cluster at all, and every placement of one."""

from collections.abc import Iterator, Mapping
from itertools import permutations

from hypothesis import strategies as st

from services.placement.domain.candidates import Candidates, candidates_of
from services.placement.domain.cluster import Backend, Cluster, Link, LinkKind, Node, cluster_of
from services.placement.domain.model import Model
from services.placement.domain.request import PlacementRequest
from services.placement.domain.shards import fits
from services.placement.domain.speed import Pace, Prediction
from tests.unit.placement.builders import address_of, every_split


def node(node_id: str, memory: int = 1000, speed: int = 10**9, multiply_adds: int = 10**9) -> Node:
    return Node(node_id, node_id, memory, (Backend.CPU,), (), speed, multiply_adds)


def links(a: str, b: str, round_trip: int = 1000, throughput: int = 10**9) -> list[Link]:
    return [
        Link(x, y, address_of(y), LinkKind.ETHERNET, round_trip, throughput)
        for x, y in ((a, b), (b, a))
    ]


def cluster(nodes: Mapping[str, int], memory: int = 1000, round_trip: int = 1000) -> Cluster:
    """Nodes by speed, in full mesh."""
    ids = list(nodes)
    return cluster_of(
        [node(n, memory, speed) for n, speed in nodes.items()],
        [link for i, a in enumerate(ids) for b in ids[:i] for link in links(a, b, round_trip)],
    )


@st.composite
def models(draw: st.DrawFn, most_layers: int = 7) -> Model:
    layers = tuple(draw(st.lists(st.integers(5, 30), min_size=1, max_size=most_layers)))
    embedding, head = draw(st.integers(0, 20)), draw(st.integers(0, 20))
    cuts = draw(st.none() | st.sets(st.integers(1, most_layers)))
    return Model(
        "org/m",
        "c",
        "llama",
        True,
        layers,
        embedding,
        head,
        sum(layers) + embedding + head,
        cuts=None if cuts is None else frozenset(range(1, len(layers))).intersection(cuts),
    )


@st.composite
def clusters(draw: st.DrawFn, most_nodes: int = 5) -> Cluster:
    ids = "abcdefgh"[: draw(st.integers(1, most_nodes))]
    nodes = [
        node(n, draw(st.integers(0, 120)), draw(st.sampled_from([0, 10**8, 3 * 10**8, 10**9])))
        for n in ids
    ]
    joined = [
        link
        for i, a in enumerate(ids)
        for b in ids[:i]
        if draw(st.integers(0, 3))
        for link in links(a, b, draw(st.integers(1, 100)), draw(st.sampled_from([10**8, 10**10])))
    ]
    return cluster_of(nodes, joined)


def every_placement(
    of: Cluster, model: Model, request: PlacementRequest
) -> Iterator[tuple[tuple[str, ...], tuple[int, ...], Prediction]]:
    """Every order of every set that is a ring of calibrated nodes, with every split that fits."""
    candidates: Candidates = candidates_of(of, {}, request)
    pace = Pace(of, model)
    for size in range(request.min_node_count, len(candidates.node_ids) + 1):
        for order in permutations(candidates.node_ids, size):
            around = zip(order, (*order[1:], order[0]), strict=True)
            joined = size == 1 or all(candidates.graph.has_edge(a, b) for a, b in around)
            if not joined or not request.required <= set(order):
                continue
            rooms = [candidates.rooms[n] for n in order]
            for counts in every_split(model.layer_count, size):
                if fits(model, rooms, counts) and (found := pace.predict(order, counts)):
                    yield order, counts, found
