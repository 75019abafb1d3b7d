"""The parts of the search, each against a plain way to find the same."""

from itertools import combinations, permutations

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.placement.domain.best_set import best_set
from services.placement.domain.budget import Budget
from services.placement.domain.chance import Chance
from services.placement.domain.ears import EarSearch
from services.placement.domain.hamilton import cycle_through
from services.placement.domain.ladder import Ladder
from services.placement.domain.least_hops import best_potentials
from services.placement.domain.net import Net, blocks, members, net_of, set_of, sides, two_core
from services.placement.domain.rings import RingQuestion, cycle_hops
from services.placement.domain.shorter import shorter
from services.placement.domain.walk import HeaviestWalk

STEPS = 100_000


@st.composite
def graphs(draw: st.DrawFn, *, least_nodes: int = 1) -> nx.Graph:
    count = draw(st.integers(least_nodes, 8))
    density = draw(st.sampled_from([2, 4, 7, 10]))
    graph = nx.empty_graph(count)
    for a, b in combinations(range(count), 2):
        if draw(st.integers(1, 10)) <= density:
            graph.add_edge(a, b, hop=draw(st.integers(1, 50)))
    return nx.relabel_nodes(graph, {i: f"n{i}" for i in range(count)})


def every(net: Net) -> int:
    return (1 << len(net.ids)) - 1


def mesh_net(count: int) -> Net:
    graph = nx.complete_graph([f"n{i:03d}" for i in range(count)])
    nx.set_edge_attributes(
        graph, {edge: 100 + i * 7919 % 997 for i, edge in enumerate(graph.edges)}, "hop"
    )
    return net_of(graph)


def question(net: Net, size: int, weight: list[int], **fields: object) -> RingQuestion:
    given_fields = {"required": 0, "needs": (), "accept": lambda ring: True, **fields}
    return RingQuestion(net, every(net), size, weight=weight, **given_fields)  # type: ignore[arg-type]


def is_cycle(net: Net, cycle: list[int]) -> bool:
    closed = zip(cycle, cycle[1:] + cycle[:1], strict=True)
    return len(set(cycle)) == len(cycle) and all(net.near[a] >> b & 1 for a, b in closed)


@given(graphs())
def test_blocks_core_and_sides(graph: nx.Graph) -> None:
    net = net_of(graph)
    expected = {frozenset(c) for c in nx.biconnected_components(graph) if len(c) > 2}
    assert {
        frozenset(net.named(list(members(b)))) for b in blocks(net.near, every(net))
    } == expected
    core = net.named(list(members(two_core(net.near, every(net)))))
    assert set(core) == set(nx.k_core(graph, 2))
    for part in nx.connected_components(graph):
        halves = sides(net.near, net.mask(frozenset(part)))
        assert (halves is not None) == nx.is_bipartite(graph.subgraph(part))
        if halves is not None:
            assert halves[0] | halves[1] == net.mask(frozenset(part))


@given(graphs(least_nodes=3), st.data())
def test_the_heaviest_set_and_what_all_of_them_have(graph: nx.Graph, data: st.DataObject) -> None:
    net = net_of(graph)
    nodes = range(len(net.ids))
    size = data.draw(st.integers(3, len(net.ids)))
    amounts = st.lists(st.integers(0, 6), min_size=len(nodes), max_size=len(nodes))
    weight = data.draw(amounts)
    needs = [(data.draw(amounts), data.draw(st.integers(0, 5 * size))) for _ in range(2)]
    required = data.draw(st.sets(st.sampled_from(nodes), max_size=2))
    asked = question(net, size, weight, needs=needs, required=set_of(sorted(required)))
    possible = [
        chosen
        for chosen in combinations(nodes, size)
        if required <= set(chosen)
        and all(sum(amount[v] for v in chosen) >= needed for amount, needed in needs)
    ]
    found = best_set(asked, Budget(STEPS))
    if not possible:
        assert found is None
        return
    assert found is not None
    best = max(sum(weight[v] for v in chosen) for chosen in possible)
    assert (found.bound, sum(weight[v] for v in members(found.nodes or 0))) == (best, best)
    for chosen in possible:
        if sum(weight[v] for v in chosen) == best:
            assert found.always & ~set_of(chosen) == 0
            assert set_of(chosen) & ~(found.always | found.sometimes) == 0


@pytest.mark.parametrize("steps", [0, 10, STEPS])
@given(graph=graphs(least_nodes=4), data=st.data())
def test_bounds_on_hops_hold(steps: int, graph: nx.Graph, data: st.DataObject) -> None:
    net = net_of(graph)
    size = len(net.ids)
    orders = [list(order) for order in permutations(range(1, min(size, 7)))]
    cycles = [order for rest in orders if is_cycle(net, order := [0, *rest])]
    if size > 7 or not cycles:
        return
    ladder = Ladder(net, every(net))
    least = min(cycle_hops(net.hops, cycle)[0] for cycle in cycles)
    for thorough in (False, True):
        assert ladder.least_slowest(every(net), size, thorough=thorough) <= least
    least_sum = min(cycle_hops(net.hops, cycle)[1] for cycle in cycles)
    assert best_potentials(ladder.rungs, Budget(steps)).twice_bound <= 2 * least_sum
    known = data.draw(st.sampled_from(cycles))
    limit = cycle_hops(net.hops, known)[0]
    better = shorter(known, net.hops, ladder.rungs, limit, Budget(steps))
    assert is_cycle(net, better)
    assert sorted(better) == sorted(known)
    assert cycle_hops(net.hops, better) <= (limit, cycle_hops(net.hops, known)[1])


@given(graphs(least_nodes=3), st.integers(3, 8), st.integers(0, 5))
def test_cycles_by_rotation_are_cycles(graph: nx.Graph, size: int, seed: int) -> None:
    net = net_of(graph)
    found = cycle_through(
        net.near, every(net), Budget(STEPS), Chance(seed), size=size, always=1, rotations=50
    )
    if found is not None:
        assert is_cycle(net, found)
        assert len(found) == size
        assert 0 in found


@settings(max_examples=60, deadline=None)
@given(graphs(least_nodes=4), st.data())
def test_exchanges_find_no_heavier_cycle_than_the_exact_walk(
    graph: nx.Graph, data: st.DataObject
) -> None:
    net = net_of(graph)
    weight = [data.draw(st.integers(0, 9)) for _ in net.ids]
    for block in blocks(net.near, every(net)):
        size = data.draw(st.integers(3, block.bit_count()))
        asked = RingQuestion(net, block, size, 0, weight, (), lambda ring: True)
        walk = HeaviestWalk(asked, Budget(STEPS), -1)
        assert walk.run()
        ears = EarSearch(asked, Budget(2_000), -1, 10**6)
        ears.run()
        if ears.found is not None:
            assert is_cycle(net, ears.found)
            assert len(ears.found) == size
            assert ears.best <= walk.best


def test_a_cycle_through_a_large_sparse_graph() -> None:
    graph = nx.random_regular_graph(4, 200, seed=5)
    nx.set_edge_attributes(graph, 1, "hop")
    net = net_of(nx.relabel_nodes(graph, str))
    for size in (60, 200):
        found = cycle_through(
            net.near, every(net), Budget(STEPS), Chance(), size=size, always=0, rotations=2_000
        )
        assert found is not None
        assert is_cycle(net, found)
        assert len(found) == size


def test_an_order_of_a_large_mesh_is_near_its_bound() -> None:
    net = mesh_net(64)
    ladder = Ladder(net, every(net))
    begun = list(range(64))
    limit, total = cycle_hops(net.hops, begun)
    better = shorter(begun, net.hops, ladder.rungs, limit, Budget(STEPS))
    bound = best_potentials(ladder.rungs, Budget(STEPS)).twice_bound / 2
    assert bound <= cycle_hops(net.hops, better)[1] < 1.25 * bound < total
