"""What caches take, and which are kept."""

from hypothesis import given, settings
from hypothesis import strategies as st

from services.runner.domain.cache_room import CacheCost, CacheRoom
from services.runner.domain.prefixes import MAX_KEPT, MIN_TOKENS, Prefixes, common_length

tokens = st.lists(st.integers(0, 1), max_size=12)


def test_caches_grow_by_whole_steps() -> None:
    cost = CacheCost(100, ((10, 0),), 10_000)
    assert [cost.bytes_for(n) for n in (0, 1, 256, 257)] == [100, 2660, 2660, 5220]


def test_windows_bound_what_a_sequence_takes() -> None:
    cost = CacheCost(0, ((10, 0), (1, 100)), 10**6)
    assert cost.bytes_for(1000) == 10 * 1024 + 100 + 256
    assert cost.bytes_for(2000) - cost.bytes_for(1000) == 10 * 1024


def test_what_never_fits_is_told_with_figures() -> None:
    room = CacheRoom([CacheCost(0, ((1, 0),), 10**6), CacheCost(0, ((10, 0),), 5120)])
    assert room.shortage(512) is None
    short = room.shortage(513)
    assert short is not None
    assert (short.rank, short.token_count, short.needed_bytes, short.limit_bytes) == (
        *(1, 513, 7680, 5120),
    )
    assert room.longest(10_000) == 512
    assert room.longest(300) == 300
    assert room.fits([256, 256])
    assert not room.fits([256, 257])


def test_caches_are_cut_back_only_where_every_rank_can() -> None:
    def below(*limits: int | None) -> int | None:
        return CacheRoom([CacheCost(0, (), 1, limit) for limit in limits]).trimmable_below

    assert below(None, None) is None
    assert below(None, 30, 20) == 20
    assert below(None, 0) == 0


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 900)), max_size=9), st.integers(1, 5))
@settings(max_examples=100, deadline=None)
def test_fewer_kinds_never_take_less(kinds: list[tuple[int, int]], count: int) -> None:
    cost = CacheCost(5, tuple(kinds), 1)
    fewer = CacheCost(5, cost.kinds_at_most(count), 1)
    assert len(fewer.kinds) <= max(count, 1)
    for length in (0, 1, 300, 2000, 5000):
        # A window's bound lies up to a step above what is taken without one.
        assert fewer.bytes_for(length) + sum(k for k, w in kinds if w) * 256 >= cost.bytes_for(
            length
        )


@given(tokens, tokens)
@settings(max_examples=200, deadline=None)
def test_the_common_beginning_is_found(one: list[int], other: list[int]) -> None:
    length = common_length(one, other)
    assert one[:length] == other[:length]
    assert one[: length + 1] != other[: length + 1] or length == min(len(one), len(other))


LONG = list(range(100))


def test_the_longest_beginning_is_re_used_but_the_last_token() -> None:
    prefixes = Prefixes(None)
    entry, dropped = prefixes.keep(LONG[:50], 0)
    assert (entry, dropped) == (1, [])
    found = prefixes.find(LONG[:50])
    assert found is not None
    assert (found.entry, found.length) == (1, 49)
    found = prefixes.find([*LONG[:30], 7, 7])
    assert found is not None
    assert found.length == 30
    assert prefixes.find([*LONG[: MIN_TOKENS - 1], 7, 7]) is None


def test_a_longer_one_takes_the_place_of_a_shorter_one_that_it_serves() -> None:
    prefixes = Prefixes(60)
    assert prefixes.keep(LONG[:40], 0) == (1, [])
    assert prefixes.keep(LONG[:50], 0) == (2, [1])
    assert prefixes.keep(LONG[:45], 0) == (None, [])
    # Of 70 tokens it cannot be cut back to 50.
    assert prefixes.keep(LONG[:70], 0) == (3, [])
    assert prefixes.keep(LONG[:70], 0) == (None, [])
    assert prefixes.keep(LONG[:65], 0) == (4, [])


def test_what_whole_chunks_computed_is_not_lost_to_what_they_did_not() -> None:
    prefixes = Prefixes(None)
    assert prefixes.keep(LONG[:40], 32) == (1, [])
    assert prefixes.keep(LONG[:60], 0) == (2, [])
    found = prefixes.find(LONG, 16)
    assert found is not None
    assert (found.entry, found.length, found.exact_count) == (1, 32, 32)
    assert prefixes.keep(LONG[:60], 48) == (3, [2, 1])
    assert prefixes.keep(LONG[:60], 32) == (None, [])


def test_the_least_recently_used_is_forgotten() -> None:
    prefixes = Prefixes(None)
    kept = [[n] * MIN_TOKENS for n in range(MAX_KEPT)]
    for each in kept:
        assert prefixes.keep(each, 0)[1] == []
    prefixes.find([*kept[0], 1])
    assert prefixes.keep([99] * MIN_TOKENS, 0) == (MAX_KEPT + 1, [2])
    assert prefixes.drop_oldest() == 3
    assert len(list(prefixes)) == MAX_KEPT - 1
    for _ in range(MAX_KEPT - 1):
        prefixes.drop_oldest()
    assert prefixes.drop_oldest() is None


def test_too_few_tokens_are_not_kept() -> None:
    assert Prefixes(None).keep(LONG[: MIN_TOKENS - 1], 0) == (None, [])
