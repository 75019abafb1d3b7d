"""The choice among rings: by example, then against listing every cycle."""

from collections.abc import Sequence
from itertools import pairwise, product

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.errors import ShardringError
from services.placement.domain.budget import Budget, Stopped
from services.placement.domain.candidates import (
    WHOLE,
    Candidates,
    Download,
    DownloadState,
    candidates_of,
)
from services.placement.domain.cluster import Cluster, Link, cluster_of
from services.placement.domain.decide import place
from services.placement.domain.model import Model
from services.placement.domain.net import net_of
from services.placement.domain.rings import RingQuestion
from services.placement.domain.search import (
    TOTAL_STEPS,
    Found,
    best_ring,
    ring_of_size,
    smallest_ring,
)
from services.placement.domain.shards import fits
from tests.unit.placement.builders import (
    both_ways,
    candidates,
    cluster,
    every_split,
    mesh,
    model,
    node,
    one_way,
    request,
)

UNFINISHED = DownloadState.UNFINISHED


def search(of: Candidates, wanted: Model, least: int = 1, *, steps: int = TOTAL_STEPS) -> Found:
    return smallest_ring(of, wanted, least, Budget(steps))


def mesh_with_hop(node_ids: str, hop: int) -> list[Link]:
    return [one_way(a, b, hop) for a in node_ids for b in node_ids if a != b]


def chosen(of: Candidates, wanted: Model, least: int = 1) -> str:
    found = search(of, wanted, least)
    assert found.proven
    return "".join(sorted(found.ring or ()))


def test_fewest_nodes_win() -> None:
    assert chosen(candidates(cluster({"a": 60, "b": 70, "c": 130})), model()) == "c"
    assert chosen(candidates(cluster({"a": 60, "b": 70, "c": 110})), model()) == "bc"


def test_a_small_ring_never_hides_a_larger_valid_one() -> None:
    # "c" alone has the memory but "a" is required, and the pair is not linked.
    linked = cluster(
        {"a": 60, "b": 70, "c": 500, "d": 60},
        [*both_ways("a", "b"), *both_ways("b", "c"), *both_ways("c", "d"), *both_ways("d", "a")],
    )
    assert chosen(candidates(linked, asked=request(required="ac")), model()) == "abcd"


def test_a_leaf_goes_before_downloads_and_memory() -> None:
    # "d" has one outgoing neighbour.
    linked = cluster(
        {"a": 100, "b": 100, "c": 100, "d": 61},
        [*mesh("abc"), *both_ways("c", "d")],
    )
    whole = {"a": Download(DownloadState.COMPLETED, 0, 0)}
    assert chosen(candidates(linked, whole), model(), 2) == "cd"


def test_a_one_way_link_counts_as_an_outgoing_neighbour() -> None:
    linked = cluster({"a": 100, "b": 90, "c": 80}, [*both_ways("a", "b"), one_way("a", "c")])
    assert linked.leaves == {"b", "c"}


def test_downloads_go_before_memory() -> None:
    parts = {"b": Download(UNFINISHED, 80, 100), "a": Download(UNFINISHED, 30, 100)}
    assert chosen(candidates(cluster({"a": 500, "b": 200}), parts), model()) == "b"


def test_a_failed_download_counts_nothing() -> None:
    failed = {"b": Download(DownloadState.FAILED, 99, 100)}
    assert chosen(candidates(cluster({"a": 500, "b": 200}), failed), model()) == "a"


@pytest.mark.parametrize(
    ("download", "score"),
    [
        (Download(DownloadState.COMPLETED, 0, 0), WHOLE),
        (Download(UNFINISHED, 1, 4), WHOLE // 4),
        (Download(UNFINISHED, 5, 4), WHOLE),
        (Download(UNFINISHED, -5, 4), 0),
        (Download(UNFINISHED, 5, 0), 0),
        (Download(DownloadState.FAILED, 4, 4), 0),
        (Download(DownloadState.NONE, 4, 4), 0),
    ],
)
def test_download_scores(download: Download, score: int) -> None:
    assert download.score == score


def test_the_order_with_the_fastest_slowest_hop() -> None:
    hops = {"ab": 1, "bc": 9, "cd": 1, "da": 2, "ac": 3, "bd": 3}
    links = [link for pair, hop in hops.items() for link in both_ways(pair[0], pair[1], hop)]
    linked = cluster(dict.fromkeys("abcd", 40), links)
    found = search(candidates(linked), model(), 4)
    assert found.ring == ("a", "b", "d", "c")


def test_a_hop_is_as_slow_as_its_slower_direction() -> None:
    slow = {("b", "a"), ("d", "c")}
    even = [link for link in mesh_with_hop("abcd", 5) if (link.source, link.sink) not in slow]
    links = [*even, *(one_way(source, sink, 9) for source, sink in slow)]
    found = search(candidates(cluster(dict.fromkeys("abcd", 40), links)), model(), 4)
    # The one ring that uses neither a-b nor c-d.
    assert found.ring == ("a", "c", "b", "d")


def test_the_heaviest_ring_may_lie_beside_the_heaviest_nodes() -> None:
    memory = {"a": 100, "b": 50, "c": 40, "d": 39, "e": 38, "g": 37, "h": 11}
    rings = ["acdh", "aebg"]
    links = [
        link for ring in rings for x, y in pairwise(ring + ring[0]) for link in both_ways(x, y)
    ]
    # Else the rings would share "a" only, and each be looked at on its own.
    links += both_ways("c", "e")
    found = search(candidates(cluster(memory, links)), model((10,) * 18), 4)
    assert found.ring == ("a", "e", "b", "g")


def test_a_ring_refused_in_one_order_is_tried_in_others() -> None:
    graph = nx.complete_graph("abcde")
    nx.set_edge_attributes(graph, 1, "hop")
    wanted = ("a", "c", "b", "d", "e")
    question = RingQuestion(net_of(graph), 0b11111, 5, 0, [1] * 5, (), lambda ring: ring == wanted)
    found = best_ring([question], Budget(TOTAL_STEPS))
    assert (found.ring, found.proven) == (wanted, True)


def test_nodes_without_backend_or_excluded_stand_in_no_ring() -> None:
    nodes = [node("a", 500, backends=()), node("b", 400), node("c", 300)]
    assert chosen(candidates(cluster_of(nodes, mesh("abc"))), model()) == "b"
    without_b = candidates(cluster_of(nodes, mesh("abc")), asked=request(excluded="b"))
    assert chosen(without_b, model()) == "c"


def test_a_ring_whose_nodes_cannot_share_the_layers_gives_way_to_the_next() -> None:
    # "a" and "b" have the most memory, yet the layers of 70 leave half of it unused.
    linked = cluster(
        {"a": 135, "b": 139, "c": 75, "d": 140},
        [*both_ways("a", "b"), *both_ways("c", "d")],
    )
    assert chosen(candidates(linked), model((70, 70, 70))) == "cd"


def test_an_unfinished_search_says_so() -> None:
    linked = candidates(cluster(dict.fromkeys("abcdefgh", 20)))
    assert search(linked, model((10,) * 14), steps=0).ring is not None
    links = [
        link
        for i, a in enumerate("abcdefghijkl")
        for j, b in enumerate("abcdefghijkl"[:i])
        for link in both_ways(a, b, 1000 + (i * 7919 + j * 104729) % 997)
    ]
    large = candidates(cluster(dict.fromkeys("abcdefghijkl", 10), links))
    assert not search(large, model(), steps=0).proven
    assert search(large, model()).proven


def test_a_search_nobody_waits_for_stops() -> None:
    of = candidates(cluster(dict.fromkeys("abcdef", 20)))
    with pytest.raises(Stopped):
        smallest_ring(of, model(), 1, Budget(TOTAL_STEPS, lambda: True))


def test_a_large_full_mesh_is_decided_at_once() -> None:
    ids = [f"n{i:03d}" for i in range(96)]
    linked = cluster({node_id: 10 + i for i, node_id in enumerate(ids)}, mesh(ids))
    found = search(candidates(linked), model((10,) * 200), 32)
    assert found.proven
    assert found.ring == tuple(ids[64:])
    # Two rings were looked at, of the 10^50 there are.
    assert found.compared_count == 2


# --- Against a plain reference that lists every simple cycle. ---


@st.composite
def problems(draw: st.DrawFn) -> tuple[Cluster, Model, dict[str, Download], int, list[str]]:
    ids = "abcdef"[: draw(st.integers(1, 6))]
    nodes = [node(node_id, draw(st.integers(0, 14))) for node_id in ids]
    dense = draw(st.booleans())
    links: list[Link] = []
    for a, b in product(ids, ids):
        if a < b:
            states = ["both", "both", "both", "one"] if dense else ["both", "one", "none"]
            hop = draw(st.sampled_from([None, 1, 2, 3]))
            state = draw(st.sampled_from(states))
            links += {"both": both_ways(a, b, hop), "one": [one_way(a, b, hop)]}.get(state, [])
    layers = draw(st.lists(st.integers(1, 4), min_size=1, max_size=7))
    wanted = model(layers, embedding=draw(st.integers(0, 4)), head=draw(st.integers(0, 4)))
    downloads = {
        node_id: Download(UNFINISHED, draw(st.integers(0, 2)), 2)
        for node_id in draw(st.sets(st.sampled_from(ids)))
    }
    required = sorted(draw(st.sets(st.sampled_from(ids), max_size=2)))
    return cluster_of(nodes, links), wanted, downloads, draw(st.integers(1, 4)), required


Score = tuple[bool, int, int, int, int]


def reference(of: Candidates, wanted: Model, least: int) -> tuple[int, Score] | None:
    """The smallest size and the best score there, by trying everything."""
    directed = nx.DiGraph()
    directed.add_nodes_from(of.node_ids)
    directed.add_edges_from(of.graph.edges)
    directed.add_edges_from((b, a) for a, b in of.graph.edges)
    rings = [[node_id] for node_id in of.node_ids] + list(nx.simple_cycles(directed))
    for size in range(least, len(of.node_ids) + 1):
        scores = [
            score_of(of, ring)
            for ring in rings
            if len(ring) == size and of.required <= set(ring) and can_hold(of, wanted, ring)
        ]
        if scores:
            return size, max(scores)
    return None


def score_of(of: Candidates, ring: Sequence[str]) -> Score:
    closed = [*ring, ring[0]] if len(ring) > 2 else list(ring)
    hops = [of.graph.edges[pair]["hop"] for pair in pairwise(closed)]
    return (
        any(node_id in of.cluster.leaves for node_id in ring),
        sum(of.download_scores[node_id] for node_id in ring),
        sum(of.memory_bytes[node_id] for node_id in ring),
        -max(hops, default=0),
        -sum(hops),
    )


def can_hold(of: Candidates, wanted: Model, ring: Sequence[str]) -> bool:
    """Whether the ring, from any of its nodes on and either way round, can be cut to fit."""
    if sum(of.memory_bytes[node_id] for node_id in ring) < wanted.weight_bytes:
        return False
    for order in (list(ring), list(reversed(ring))):
        for turn in range(len(order)):
            rooms = [of.rooms[n] for n in order[turn:] + order[:turn]]
            if any(fits(wanted, rooms, c) for c in every_split(wanted.layer_count, len(rooms))):
                return True
    return False


@settings(max_examples=250, deadline=None)
@given(problems())
def test_against_listing_every_cycle(
    problem: tuple[Cluster, Model, dict[str, Download], int, list[str]],
) -> None:
    of, wanted, downloads, least, required = problem
    asked = request(least, required=required)
    of_candidates = candidates_of(of, downloads, asked)
    expected = reference(of_candidates, wanted, least)
    try:
        placement = place(of, wanted, downloads, asked)
    except ShardringError:
        assert expected is None
        return
    assert expected is not None
    ring = [rank.node_id for rank in placement.ranks]
    assert (len(ring), score_of(of_candidates, ring)) == expected
    assert placement.score.proven_optimal
    assert placement == place(of, wanted, downloads, asked)
    # Shards: contiguous, complete, none above what its node has.
    assert [rank.start for rank in placement.ranks] == [0, *(r.end for r in placement.ranks[:-1])]
    assert placement.ranks[-1].end == wanted.layer_count
    assert all(rank.weight_bytes <= rank.memory_available_bytes for rank in placement.ranks)
    # Host lists: each neighbour at an address verified from here.
    verified = {(link.source, link.sink, link.address) for link in of.links}
    for rank in placement.ranks if len(ring) > 1 else ():
        for step in (1, -1):
            other = placement.ranks[(rank.rank + step) % len(ring)]
            address = rank.hosts[other.rank].rsplit(":", 1)[0]
            assert (rank.node_id, other.node_id, address) in verified


@settings(max_examples=60, deadline=None)
@given(problems())
def test_every_size_against_listing_every_cycle(
    problem: tuple[Cluster, Model, dict[str, Download], int, list[str]],
) -> None:
    of, wanted, downloads, _, required = problem
    of_candidates = candidates_of(of, downloads, request(required=required))
    for size in range(1, min(len(of_candidates.node_ids), wanted.layer_count) + 1):
        found = ring_of_size(of_candidates, wanted, size, Budget(TOTAL_STEPS))
        expected = reference(of_candidates, wanted, size)
        if expected is None or expected[0] != size:
            assert found.ring is None
        else:
            assert found.ring is not None
            assert score_of(of_candidates, found.ring) == expected[1]


@pytest.mark.parametrize(("embedding", "head"), [(900, 0), (0, 900)])
def test_a_model_whose_end_fits_nowhere_is_soon_ruled_out(embedding: int, head: int) -> None:
    """Enough memory in sum, but no node holds the embedding, or the head: no search at all."""
    ids = [chr(ord("a") + i) for i in range(20)]
    wanted = model([100] * 20, embedding=embedding, head=head)
    found = search(candidates(cluster(dict.fromkeys(ids, 500))), wanted, steps=1)
    assert (found.ring, found.proven, found.compared_count) == (None, True, 0)


def test_both_ends_need_a_node_each() -> None:
    ends = model([100] * 20, embedding=700, head=700)
    one_large = {**dict.fromkeys("bcdefghijklmnopqrst", 500), "a": 1500}
    assert search(candidates(cluster(one_large)), ends, 2, steps=1).proven
    assert search(candidates(cluster(one_large)), ends, 2).ring is None
    two_large = {**one_large, "b": 1500}
    assert {"a", "b"} <= set(search(candidates(cluster(two_large)), ends, 2).ring or ())
