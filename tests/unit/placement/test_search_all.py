"""The search against listing every cycle of up to seven nodes: same rings, to the last rule."""

from collections.abc import Iterator, Sequence
from itertools import combinations

import networkx as nx
from hypothesis import given, settings
from hypothesis import strategies as st

from services.placement.domain.budget import Budget
from services.placement.domain.candidates import Candidates, Download, DownloadState, candidates_of
from services.placement.domain.cluster import Link, cluster_of
from services.placement.domain.demand import demand_of
from services.placement.domain.model import Model
from services.placement.domain.rings import Ring, hop_score
from services.placement.domain.search import TOTAL_STEPS, RingSearch, ring_of_size, smallest_ring
from tests.unit.placement.builders import both_ways, model, node, request

Problem = tuple[Candidates, Model]

memories = st.sampled_from(
    [st.just(12), st.integers(8, 10), st.integers(0, 30), st.sampled_from([6, 24])]
)
hop_kinds = st.sampled_from([st.just(5), st.integers(1, 3), st.integers(1, 10**6)])
# How many of ten pairs are linked.
densities = st.sampled_from([10, 10, 8, 5, 3])


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    ids = "abcdefg"[: draw(st.integers(3, 7))]
    memory, hops, density = draw(memories), draw(hop_kinds), draw(densities)
    nodes = [node(node_id, draw(memory)) for node_id in ids]
    links: list[Link] = []
    for a, b in combinations(ids, 2):
        if draw(st.integers(1, 10)) <= density:
            links += both_ways(a, b, draw(hops))
    layers = draw(
        st.one_of(
            st.builds(lambda n: [4] * n, st.integers(3, 14)),
            st.lists(st.integers(1, 6), min_size=3, max_size=12),
        )
    )
    ends = st.sampled_from([0, 0, 5])
    wanted = model(layers, embedding=draw(ends), head=draw(ends))
    downloads = {
        node_id: Download(DownloadState.UNFINISHED, draw(st.integers(0, 3)), 3)
        for node_id in (ids if draw(st.booleans()) else "")
    }
    required = draw(st.sets(st.sampled_from(ids), max_size=2))
    asked = request(required=sorted(required))
    return candidates_of(cluster_of(nodes, links), downloads, asked), wanted


def every_ring(of: Candidates) -> Iterator[Ring]:
    yield from ((node_id,) for node_id in of.node_ids)
    yield from (tuple(sorted(edge)) for edge in of.graph.edges)
    for cycle in nx.simple_cycles(of.graph):
        at = cycle.index(min(cycle))
        turned = (*cycle[at:], *cycle[:at])
        yield min(turned, (turned[0], *reversed(turned[1:])))


def key(of: Candidates, ring: Ring) -> tuple[bool, int, int, tuple[int, int], Ring]:
    return (
        of.cluster.leaves.isdisjoint(ring),
        -sum(of.download_scores[node_id] for node_id in ring),
        -sum(of.memory_bytes[node_id] for node_id in ring),
        hop_score(of.graph, ring),
        ring,
    )


def best_of(of: Candidates, wanted: Model, rings: Sequence[Ring]) -> Ring | None:
    if not rings:
        return None
    demand = demand_of(of, wanted, len(rings[0]))
    fitting = [
        ring
        for ring in rings
        if of.required <= set(ring) <= set(demand.able) and demand.accept(ring)
    ]
    return min(fitting, key=lambda ring: key(of, ring), default=None)


@settings(max_examples=300, deadline=None)
@given(problems())
def test_every_size_gets_the_ring_that_listing_all_gives(problem: Problem) -> None:
    of, wanted = problem
    rings = list(every_ring(of))
    search, smallest = RingSearch(of, wanted), None
    for size in range(1, min(len(of.node_ids), wanted.layer_count) + 1):
        expected = best_of(of, wanted, [ring for ring in rings if len(ring) == size])
        found = search.of_size(size, Budget(TOTAL_STEPS))
        assert (found.ring, found.proven) == (expected, True)
        smallest = smallest or expected
    assert smallest_ring(of, wanted, 1, Budget(TOTAL_STEPS)).ring == smallest


@settings(max_examples=100, deadline=None)
@given(problems(), st.integers(0, 400))
def test_what_is_called_proven_with_few_steps_is_the_best(problem: Problem, steps: int) -> None:
    of, wanted = problem
    rings = list(every_ring(of))
    for size in range(3, min(len(of.node_ids), wanted.layer_count) + 1):
        expected = best_of(of, wanted, [ring for ring in rings if len(ring) == size])
        found = ring_of_size(of, wanted, size, Budget(steps))
        assert found == ring_of_size(of, wanted, size, Budget(steps))
        if found.ring is not None:
            assert found.ring in rings
            assert expected is not None
            if found.proven:
                assert key(of, found.ring)[:-1] == key(of, expected)[:-1]
        elif found.proven:
            assert expected is None


@settings(max_examples=60, deadline=None)
@given(problems(), st.data())
def test_without_a_node_is_as_if_it_were_not_there(problem: Problem, data: st.DataObject) -> None:
    of, wanted = problem
    left_out = data.draw(st.sampled_from(of.node_ids))
    size = data.draw(st.integers(1, len(of.node_ids)))
    found = RingSearch(of, wanted).of_size(size, Budget(TOTAL_STEPS), frozenset(left_out))
    rest = of.only([node_id for node_id in of.node_ids if node_id != left_out])
    assert found.ring == ring_of_size(rest, wanted, size, Budget(TOTAL_STEPS)).ring
