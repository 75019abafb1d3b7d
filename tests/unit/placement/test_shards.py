from dataclasses import replace
from itertools import zip_longest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.placement.domain.model import Model, Sharding
from services.placement.domain.shards import (
    Room,
    can_split,
    fits,
    proportional,
    rank_order,
    ring_fits,
    split,
)
from tests.unit.placement.builders import every_split, model


def rooms(*memory: int) -> list[Room]:
    return [Room(have) for have in memory]


@pytest.mark.parametrize(
    ("layer_count", "memory", "expected"),
    [
        (12, (500, 500, 1000), [3, 3, 6]),
        (12, (312, 468, 1092), [2, 3, 7]),
        (20, (900, 50, 50), [18, 1, 1]),
        (12, (5, 5, 1190), [1, 1, 10]),
        (3, (1, 1, 10**15), [1, 1, 1]),
        (7, (100, 100), [4, 3]),
        (5, (7,), [5]),
    ],
)
def test_proportional(layer_count: int, memory: tuple[int, ...], expected: list[int]) -> None:
    assert proportional(layer_count, memory) == expected


def test_an_overfilled_node_gives_its_excess_to_nodes_with_room() -> None:
    # By memory 3/3/6; the last also holds a head, so only 5 of its 6 layers fit.
    assert split(model(head=50), rooms(50, 50, 100)) == [3, 4, 5]
    # By memory 6/3/3; the first also holds the embedding.
    assert split(model(embedding=50), rooms(100, 50, 50)) == [5, 3, 4]


def test_the_excess_is_spread_evenly() -> None:
    # By memory 4/4/4; only two of the first node's layers fit beside the embedding.
    assert split(model(embedding=100), rooms(120, 120, 120)) == [2, 5, 5]


def test_explicit_numbers_and_limits_of_layers_are_kept() -> None:
    # By memory 4/4/4.
    assert split(model(), [Room(100, 6, 6), Room(100), Room(100)]) == [6, 3, 3]
    assert split(model(), [Room(100, 1, 2), Room(100), Room(100)]) == [2, 5, 5]
    assert split(model(), [Room(100, 1, 2), Room(50), Room(40)]) is None
    assert split(model(), [Room(200, 11, 11)]) is None


def test_the_key_value_cache_counts_with_each_layer() -> None:
    asked = replace(model(), key_value_bytes_per_token=12).run_as(Sharding.PIPELINE, 10)
    assert asked.needed_bytes == 120 + 120
    assert (asked.stage_bytes(0, 3), asked.stage_weight_bytes(0, 3)) == (60, 30)
    assert split(asked, rooms(80, 160)) == [4, 8]
    assert split(asked, rooms(80, 159)) is None


def test_a_model_is_cut_only_where_it_may_be() -> None:
    # By memory 4/4/4.
    assert split(model(cuts=[2, 5, 9]), rooms(100, 100, 100)) == [5, 4, 3]
    assert split(model(cuts=[2, 5]), rooms(100, 100, 100)) == [2, 3, 7]
    assert split(model(cuts=[2, 5]), rooms(100, 100, 69)) is None
    assert split(model(cuts=[2]), rooms(100, 100, 100)) is None
    assert split(model(cuts=[]), rooms(120)) == [12]
    assert not fits(model(cuts=[2, 5]), rooms(100, 100, 100), [4, 4, 4])


def test_no_split_when_the_sum_fits_but_no_cut_does() -> None:
    assert split(model((70, 70, 70)), rooms(105, 105)) is None


def test_stages_need_different_bytes_when_layers_differ() -> None:
    assert split(model((10, 10, 10, 90)), rooms(60, 95)) == [3, 1]


def test_a_tied_head_costs_a_single_node_nothing() -> None:
    tied = model(embedding=50, head=55, tied=50)
    assert tied.stage_bytes(0, 12) == 120 + 55
    assert tied.stage_bytes(0, 6) == 60 + 50
    assert tied.stage_bytes(6, 12) == 60 + 55
    assert split(tied, rooms(175)) == [12]
    assert split(tied, rooms(174)) is None


def test_the_ring_is_turned_so_that_the_ends_fit() -> None:
    small_first = {"a": Room(45), "b": Room(100), "c": Room(100)}
    # "a" cannot hold the embedding beside its layers by memory, so it is not rank 0; the head is
    # as large, so it is not the last rank either.
    found = rank_order(model(embedding=40, head=40), ("a", "b", "c"), small_first)
    assert found is not None
    order, counts = found
    assert order == ("c", "a", "b")
    assert fits(model(embedding=40, head=40), [small_first[node] for node in order], counts)


def test_rank_0_is_the_smallest_id_where_nothing_speaks_against_it() -> None:
    assert rank_order(model(), ("a", "c", "b"), dict.fromkeys("abc", Room(100))) == (
        ("a", "c", "b"),
        [4, 4, 4],
    )


models = st.builds(
    lambda layers, embedding, head, tied, cuts: model(
        layers, embedding=embedding, head=head, tied=min(embedding, head) if tied else 0, cuts=cuts
    ),
    st.lists(st.integers(1, 5), min_size=1, max_size=7),
    st.integers(0, 6),
    st.integers(0, 6),
    st.booleans(),
    st.none() | st.sets(st.integers(1, 6)),
)


@given(
    models,
    st.lists(st.integers(0, 20), min_size=1, max_size=4),
    st.lists(st.sampled_from([(1, 1), (1, 2), (2, 2), (1, 4), (3, 3)]), max_size=4),
)
def test_split_against_trying_every_split(
    of: Model, memory: list[int], bounds: list[tuple[int, int]]
) -> None:
    taken = [
        Room(have, *(bounds or (1, of.layer_count)))
        for have, bounds in zip_longest(memory, bounds[: len(memory)])
    ]
    fitting = [c for c in every_split(of.layer_count, len(memory)) if fits(of, taken, c)]
    assert can_split(of, taken) == bool(fitting)
    if sum(memory) == 0 or of.layer_count < len(memory):
        return
    found = split(of, taken)
    if not fitting:
        assert found is None
        return
    assert found is not None
    assert tuple(found) in fitting
    wanted = proportional(of.layer_count, memory)

    def moved(counts: tuple[int, ...] | list[int]) -> int:
        return sum((have - want) ** 2 for have, want in zip(counts, wanted, strict=True))

    assert moved(found) == min(map(moved, fitting))


@given(models, st.lists(st.integers(1, 20), min_size=1, max_size=4))
def test_no_stage_holds_more_than_most_layers_says(of: Model, memory: list[int]) -> None:
    for have in memory:
        held = [
            end - start
            for start in range(of.layer_count)
            for end in range(start + 1, of.layer_count + 1)
            if of.stage_bytes(start, end) <= have
        ]
        assert max(held, default=0) <= of.most_layers(have)


@given(models, st.lists(st.integers(1, 20), min_size=1, max_size=4))
def test_ring_fits_says_whether_there_is_an_order(of: Model, memory: list[int]) -> None:
    ring = [f"n{i}" for i in range(len(memory))]
    held = {node: Room(have) for node, have in zip(ring, memory, strict=True)}
    if of.layer_count >= len(memory):
        assert ring_fits(of, ring, held) == (rank_order(of, ring, held) is not None)
