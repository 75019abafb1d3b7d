"""Predicted speed: the arithmetic, the split and the ring, against enumeration of everything."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.errors import Reason, ShardringError
from services.placement.domain.candidates import candidates_of
from services.placement.domain.cluster import Cluster, Link, LinkKind, RingBackend, cluster_of
from services.placement.domain.decide import place, preview
from services.placement.domain.model import Model, Sharding
from services.placement.domain.placement import Placement
from services.placement.domain.request import Objective, PlacementRequest, request_of
from services.placement.domain.shards import Room, fits
from services.placement.domain.speed import Pace, Part, Prediction
from services.placement.domain.speed_split import Stages, split_by_speed
from tests.unit.placement.builders import every_split, model
from tests.unit.placement.fast import cluster, clusters, every_placement, links, models, node

WAYS = [(Sharding.PIPELINE, RingBackend.MLX_RING)]
OBJECTIVES = st.sampled_from([Objective.DECODE_LATENCY, Objective.THROUGHPUT])


def request(objective: Objective = Objective.DECODE_LATENCY, **fields: object) -> PlacementRequest:
    return request_of(model_id="org/m", objective=objective, **fields)  # type: ignore[arg-type]


def figure(found: Prediction, objective: Objective) -> int:
    if objective is Objective.THROUGHPUT:
        return found.slowest.nanoseconds
    return found.decode_nanoseconds


def test_the_arithmetic() -> None:
    of = cluster_of(
        [node("a", speed=1000, multiply_adds=500), node("b", speed=4000, multiply_adds=2000)],
        [
            Link("a", "b", "10.0.0.2", LinkKind.ETHERNET, 2_000_000, 1_000_000),
            Link("b", "a", "10.0.0.1", LinkKind.ETHERNET, 4_000_000, 1_000_000),
        ],
    )
    of = replace(of, message_bytes=1000)
    pace = Pace(of, replace(model([10] * 4, embedding=100, head=20), hidden_bytes_per_value=2))
    # Stages: 10 bytes of 1000 a second, 30 and the head of 4000; the embedding is not read.
    # Hops: the slower direction, half of 4 ms, and 1000 bytes or 4 bytes of 1 MB a second.
    stages, hops = [10_000_000, 12_500_000], [3_000_000, 2_004_000]
    found = pace.predict(("a", "b"), (1, 3))
    assert found is not None
    assert found.decode_nanoseconds == sum(stages) + sum(hops)
    assert found.slowest == Part(1, False, 12_500_000)
    assert found.tokens_per_second == pytest.approx(1e9 / 27_504_000)
    assert found.throughput_tokens_per_second == 80
    # 5 weights of 500 a second, 15 of 2000, and 1000 bytes of 1 MB a second.
    assert found.prefill_tokens_per_second == pytest.approx(1 / (0.01 + 0.0075 + 0.001))
    quantized = Pace(of, replace(pace.model, quantized=True)).predict(("a", "b"), (1, 3))
    assert quantized is not None
    assert quantized.prefill_tokens_per_second == 0
    alone = pace.predict(("b",), (4,))
    assert alone is not None
    assert (alone.decode_nanoseconds, alone.slowest) == (15_000_000, Part(0, False, 15_000_000))


def test_a_slow_hop_bounds_the_throughput() -> None:
    of = cluster({"a": 10**9, "b": 10**9}, round_trip=10**6)
    found = Pace(of, model([100] * 2)).predict(("a", "b"), (1, 1))
    assert found is not None
    assert (found.slowest.rank, found.slowest.is_hop) == (0, True)


@pytest.mark.parametrize(("rtt", "rate", "speed"), [(None, 1, 1), (1, None, 1), (1, 1, 0)])
def test_nothing_is_predicted_without_figures(
    rtt: int | None, rate: int | None, speed: int
) -> None:
    of = cluster_of(
        [node("a"), node("b", speed=speed)],
        [
            Link("a", "b", "10.0.0.2", LinkKind.ETHERNET, rtt, rate),
            Link("b", "a", "10.0.0.1", LinkKind.ETHERNET, 1, 1),
        ],
    )
    assert Pace(of, model()).predict(("a", "b"), (6, 6)) is None
    placed = place(of, model(), {}, request(Objective.DEFAULT, min_node_count=2))
    assert placed.predicted is None


def test_the_default_rules_keep_their_choice_and_tell_what_to_expect() -> None:
    of = cluster({"a": 10**8, "b": 10**9}, memory=2000)
    plain = place(of, model(), {}, request(Objective.DEFAULT))
    assert [rank.node_id for rank in plain.ranks] == ["a"]
    assert plain.predicted == Pace(of, model()).predict(("a",), (12,))
    fast = place(of, model(), {}, request())
    assert [rank.node_id for rank in fast.ranks] == ["b"]
    assert fast.score.proven_optimal


def test_latency_fills_the_fastest_and_throughput_evens_out() -> None:
    of = cluster({"a": 10**6, "b": 3 * 10**6}, memory=90)
    latency = place(of, model(), {}, request())
    assert {rank.node_id: rank.end - rank.start for rank in latency.ranks} == {"a": 3, "b": 9}
    of = cluster({"a": 10**6, "b": 5 * 10**6}, memory=1000)
    evened = place(of, model(), {}, request(Objective.THROUGHPUT))
    assert {rank.node_id: rank.end - rank.start for rank in evened.ranks} == {"a": 2, "b": 10}


@settings(max_examples=150, deadline=None)
@given(
    models(9),
    st.lists(
        st.tuples(st.integers(10, 150), st.integers(1, 3), st.integers(2, 9), st.integers(1, 9)),
        min_size=1,
        max_size=4,
    ),
    OBJECTIVES,
)
def test_a_split_by_speed_is_the_best_of_all(
    of: Model, given_nodes: list[tuple[int, int, int, int]], objective: Objective
) -> None:
    ids = "abcd"[: len(given_nodes)]
    rooms = {n: Room(*room[:3]) for n, room in zip(ids, given_nodes, strict=True)}
    speeds = {n: room[3] * 10**6 for n, room in zip(ids, given_nodes, strict=True)}
    pace = Pace(cluster(speeds, round_trip=2), of)
    stages = Stages(pace, rooms)

    def figures(counts: tuple[int, ...]) -> tuple[int, int]:
        times, start = [], 0
        for node_id, count in zip(ids, counts, strict=True):
            times.append(pace.stage(node_id, start, start + count))
            start += count
        return (max(times), sum(times)) if objective is Objective.THROUGHPUT else (sum(times), 0)

    fitting = [
        counts
        for counts in every_split(of.layer_count, len(ids))
        if fits(of, [rooms[n] for n in ids], counts)
    ]
    best = min(map(figures, fitting), default=None)
    counts = split_by_speed(stages, ids, objective)
    assert (counts and figures(tuple(counts))) == best
    if best is not None:
        assert split_by_speed(stages, ids, objective, below=best[0]) is None
        assert split_by_speed(stages, ids, objective, below=best[0] + 1) == counts


@settings(max_examples=150, deadline=None)
@given(clusters(), models(5), OBJECTIVES, st.integers(1, 3), st.integers(0, 2))
def test_the_ring_is_the_best_of_all(
    of: Cluster, wanted: Model, objective: Objective, least: int, required: int
) -> None:
    asked = request(objective, min_node_count=least, required=tuple(of.nodes)[:required])
    best = min(
        (figure(found, objective) for _, _, found in every_placement(of, wanted, asked)),
        default=None,
    )
    if best is None:
        with pytest.raises(ShardringError) as refused:
            place(of, wanted, {}, asked)
        if all(n.weight_bytes_per_second for n in of.nodes.values()):
            assert refused.value.reason is not Reason.NOT_CALIBRATED
        return
    placed = place(of, wanted, {}, asked)
    assert placed.predicted is not None
    assert figure(placed.predicted, objective) == best
    assert placed.score.proven_optimal
    check(placed, of, wanted, asked)
    assert place(of, wanted, {}, asked) == placed
    by_size = preview(of, wanted, {}, asked, WAYS)
    figures = [
        figure(one.outcome.predicted, objective)
        for one in by_size
        if isinstance(one.outcome, Placement) and one.outcome.predicted
    ]
    assert min(figures) == best


def check(placed: Placement, of: Cluster, wanted: Model, asked: PlacementRequest) -> None:
    candidates = candidates_of(of, {}, asked)
    order = tuple(rank.node_id for rank in placed.ranks)
    counts = [rank.end - rank.start for rank in placed.ranks]
    assert [rank.start for rank in placed.ranks] == [sum(counts[:i]) for i in range(len(counts))]
    assert sum(counts) == wanted.layer_count
    assert fits(wanted, [candidates.rooms[n] for n in order], counts)
    assert asked.required <= set(order)
    assert placed.predicted == Pace(of, wanted).predict(order, counts)


@pytest.mark.parametrize("objective", [Objective.DECODE_LATENCY, Objective.THROUGHPUT])
def test_among_many_nodes_a_ring_is_found_that_beats_the_default_one(objective: Objective) -> None:
    chance = random.Random(5)
    ids = [f"{n:03}{letter}" for n in range(4) for letter in "abcde"]
    of = cluster_of(
        [node(n, chance.randrange(30, 90), chance.choice([1, 2, 8]) * 10**5) for n in ids],
        [link for i, a in enumerate(ids) for b in ids[:i] for link in links(a, b, 100)],
    )
    wanted = model([10] * 30)
    plain = place(of, wanted, {}, request(Objective.DEFAULT))
    fast = place(of, wanted, {}, request(objective))
    assert plain.predicted
    assert fast.predicted
    assert figure(fast.predicted, objective) < figure(plain.predicted, objective)
    assert not fast.score.proven_optimal
    check(fast, of, wanted, request(objective))
    assert place(of, wanted, {}, request(objective)) == fast


def test_what_is_not_calibrated_is_named() -> None:
    of = cluster_of([node("a", 60), node("b", 100, speed=0)], links("a", "b"))
    with pytest.raises(ShardringError) as raised:
        place(of, model(), {}, request())
    assert raised.value.reason is Reason.NOT_CALIBRATED
    assert raised.value.metadata == {"node_ids": "b", "node_count": "1", "unmeasured_pairs": ""}
    one_node, two_nodes = (one.outcome for one in preview(of, model(), {}, request(), WAYS))
    assert isinstance(one_node, ShardringError)
    assert one_node.reason is Reason.NOT_ENOUGH_MEMORY
    assert isinstance(two_nodes, ShardringError)
    assert two_nodes.reason is Reason.NOT_CALIBRATED


def test_links_that_are_not_measured_are_named() -> None:
    unmeasured = [replace(link, throughput_bytes_per_second=None) for link in links("a", "b")]
    of = cluster_of([node("a", 80), node("b", 80)], unmeasured)
    with pytest.raises(ShardringError) as raised:
        place(of, model(), {}, request())
    assert raised.value.reason is Reason.NOT_CALIBRATED
    assert raised.value.metadata["unmeasured_pairs"] == "a->b"


def test_what_fits_nowhere_is_refused_as_ever() -> None:
    of = cluster({"a": 1, "b": 1}, memory=10)
    with pytest.raises(ShardringError) as raised:
        place(of, model(), {}, request())
    assert raised.value.reason is Reason.NOT_ENOUGH_MEMORY


@pytest.mark.parametrize(
    ("sharding", "ring_backend"),
    [
        (Sharding.TENSOR, RingBackend.MLX_RING),
        (Sharding.PIPELINE, RingBackend.JACCL),
    ],
)
def test_only_pipelines_on_the_mlx_ring_are_predicted(
    sharding: Sharding, ring_backend: RingBackend
) -> None:
    with pytest.raises(ShardringError) as raised:
        request(sharding=sharding, ring_backend=ring_backend)
    assert raised.value.metadata["field"] == "objective"
