"""The schedule: whatever comes in whatever order, every sequence gets what it would get alone."""

from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.runner.domain import cache_room, prefixes, schedule
from services.runner.domain.cache_room import CacheCost
from services.runner.domain.steps import Command, Decode, Prefill, Sequence
from tests.unit.runner.plain_ring import VOCABULARY, World, alone

MAX_KEPT = 3
PLENTY = 10**9


@pytest.fixture(scope="module", autouse=True)
def small() -> Iterator[None]:
    """Have everything small, so that a few tokens reach every limit."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_room, "STEP_TOKENS", 4)
        patch.setattr(prefixes, "MIN_TOKENS", 3)
        patch.setattr(prefixes, "MAX_KEPT", MAX_KEPT)
        patch.setattr(schedule, "MIN_TOKENS", 3)
        patch.setattr(schedule, "MAX_RUNNING", 7)
        patch.setattr(schedule, "MAX_PREFILLING", 3)
        patch.setattr(schedule, "_GROWTH_TOKENS", 4)
        yield


def cost(limit: int, *, fixed: int = 0, window: int = 0) -> CacheCost:
    below = 0 if fixed else window or None
    kinds = ((1, 0), (1, window)) if window else ((2, 0),)
    return CacheCost(fixed, kinds, limit, below)


limits = st.one_of(st.just(PLENTY), st.integers(20, 400))
costs = st.builds(cost, limits, fixed=st.sampled_from([0, 0, 7]), window=st.sampled_from([0, 0, 6]))
beginnings = st.sampled_from(
    [[], [1, 2, 3, 4, 0, 1], [1, 2, 3, 4, 0, 1, 2, 2, 3, 1, 0, 4], [3] * 9]
)
tokens = st.integers(0, VOCABULARY - 1)
prompts = st.builds(
    lambda beginning, rest: beginning + rest, beginnings, st.lists(tokens, min_size=1, max_size=14)
)


class Traffic(RuleBasedStateMachine):
    """Clients come and go while steps are on their way; World checks all that happens."""

    world: World

    @initialize(
        costs=st.lists(costs, min_size=1, max_size=3),
        lane_count=st.integers(1, 4),
        more=st.integers(0, 2),
        ahead=st.booleans(),
        batched=st.sampled_from([True, True, False]),
        chunk=st.sampled_from([1, 4, 5, 100]),
    )
    def begin(
        self,
        costs: list[CacheCost],
        lane_count: int,
        more: int,
        ahead: bool,
        batched: bool,
        chunk: int,
    ) -> None:
        self.world = World(
            costs,
            lane_count=lane_count,
            window=lane_count + more,
            ahead=ahead,
            batched=batched,
            chunk=chunk,
        )

    @rule(prompt=prompts, count=st.integers(1, 12), exact=st.sampled_from([False, False, True]))
    def submit(self, prompt: list[int], count: int, exact: bool) -> None:
        self.world.submit(prompt, count, exact=exact)

    @rule(prompt=prompts, count=st.integers(1, 6), choices=st.integers(2, 6))
    def submit_choices(self, prompt: list[int], count: int, choices: int) -> None:
        for _ in range(choices):
            self.world.submit(prompt, count)

    @rule(count=st.integers(1, 30))
    def issue(self, count: int) -> None:
        for _ in range(count):
            if self.world.issue() is None and self.world.issued:
                self.world.arrive()

    @precondition(lambda self: self.world.issued)
    @rule()
    def arrive(self) -> None:
        self.world.arrive()

    @precondition(lambda self: self.world.open)
    @rule(data=st.data(), keep=st.booleans())
    def end(self, data: st.DataObject, keep: bool) -> None:
        sequence, _ = self.world.open[data.draw(st.sampled_from(sorted(self.world.open)))]
        self.world.end(sequence, keep=keep)

    @invariant()
    def counts_are_right(self) -> None:
        if not hasattr(self, "world"):
            return
        ring, schedule = self.world.ring, self.world.schedule
        assert len(schedule.running) + schedule.waiting_count == len(self.world.open)
        assert len(schedule.running) <= 7
        assert all(schedule.lane_sizes)
        running, kept = schedule.cached_tokens()
        assert len(running) == len(schedule.running)
        assert len(kept) <= MAX_KEPT
        # A command may still be waiting to be told to the ring.
        assert len(ring.kept) <= MAX_KEPT + 2 * len(self.world.open) + 1

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.drain()
            assert len(self.world.ring.kept) <= MAX_KEPT
            _, kept = self.world.schedule.cached_tokens()
            assert sorted(map(len, self.world.ring.kept.values())) == sorted(kept)


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


def world(
    limit: int = PLENTY,
    *,
    lane_count: int = 2,
    window: int = 3,
    ahead: bool = False,
    chunk: int = 4,
    fixed: int = 0,
) -> World:
    costs = [cost(limit, fixed=fixed)]
    return World(
        costs, lane_count=lane_count, window=window, ahead=ahead, batched=True, chunk=chunk
    )


def submit(world: World, prompt: list[int], count: int) -> Sequence:
    sequence = world.submit(prompt, count)
    assert sequence is not None
    return sequence


def rest(world: World) -> None:
    """Have all that is on its way come back, and the next step issued."""
    while world.issued:
        world.arrive()
    world.issue()


def test_lanes_are_filled_evenly_and_stay_even() -> None:
    here = world(lane_count=3, window=4)
    sequences = [submit(here, [n % 5, 1], 30) for n in range(7)]
    while not all(s.in_lane for s in sequences):
        rest(here)
    rest(here)
    assert sorted(here.schedule.lane_sizes) == [2, 2, 3]
    by_lane: dict[int | None, list[Sequence]] = {}
    for sequence in sequences:
        by_lane.setdefault(sequence.in_lane, []).append(sequence)
    # A whole lane ends, and then all but one sequence.
    fullest, *_, emptiest = sorted(by_lane.values(), key=len)
    for sequence in fullest:
        here.end(sequence)
    rest(here)
    assert sorted(here.schedule.lane_sizes) == [1, 2, 2]
    for sequence in emptiest:
        here.end(sequence)
    rest(here)
    rest(here)
    assert sorted(here.schedule.lane_sizes) in ([1, 1], [1, 1, 1])
    here.drain()


def test_every_lane_gets_a_token_between_two_chunks_of_a_long_prompt() -> None:
    here = world(lane_count=2, window=3)
    short = [submit(here, [n, 1], 40) for n in range(2)]
    rest(here)
    long = submit(here, [1, 2] * 40, 1)
    counts = []
    while long.in_lane is None:
        if here.issue() is None:
            here.arrive()
        if isinstance(here.log[-1], Prefill):
            counts.append([s.computed for s in short])
    chunks = [step for step in here.log if isinstance(step, Prefill) and step.sequence is long]
    assert len(chunks) == 20
    between = here.log[here.log.index(chunks[0]) : here.log.index(chunks[-1])]
    assert sum(isinstance(step, Decode) for step in between) >= 2 * 19
    here.drain()


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    here = world()
    long = submit(here, [1, 2] * 100, 1)
    for _ in range(3):
        here.issue()
    short = submit(here, [3, 4, 0, 2], 1)
    while short in [s for s, _ in here.open.values()]:
        if here.issue() is None:
            here.arrive()
    assert long.prompt_left > 100
    here.drain()


def test_prompts_that_begin_alike_are_computed_once() -> None:
    here = world()
    beginning = [1, 2, 3, 4, 0, 2, 1, 3, 3, 1, 0, 2]
    sequences = [submit(here, [*beginning, n], 3) for n in range(5)]
    here.drain()
    assert [s.reused for s in sequences] == [0, 12, 12, 12, 12]
    prefilled = sum(len(step.tokens) for step in here.log if isinstance(step, Prefill))
    assert prefilled == 12
    again = submit(here, sequences[-1].tokens + [1], 2)
    here.drain()
    # All that was asked and answered before, but the last token, which was never computed.
    assert again.reused == len(sequences[-1].tokens) - 1


def test_states_are_re_used_whole_or_not_at_all() -> None:
    here = world(fixed=3)
    beginning = [1, 2, 3, 4, 0, 2, 1, 3]
    first, other = submit(here, [*beginning, 4, 4], 2), submit(here, [*beginning, 3, 3], 2)
    here.issue()
    # There is nothing to wait for: the other one's states go too far.
    assert here.schedule.waiting_count == 0
    here.drain()
    same, longer = submit(here, [*beginning, 3, 3], 2), submit(here, other.tokens + [2], 2)
    here.drain()
    assert (first.reused, other.reused) == (0, 0)
    assert (same.reused, longer.reused) == (9, 11)


def test_kept_caches_are_given_up_only_where_that_makes_room() -> None:
    here = world(120)
    kept = [1, 2, 3, 4, 0, 2, 1, 3]
    submit(here, kept, 1)
    here.drain()
    # Takes 96 of 120 bytes, beside which the kept 16 have their place.
    running = submit(here, [2] * 40, 8)
    while running.in_lane is None:
        if here.issue() is None:
            here.arrive()
    waiting = submit(here, [4, 3, 4, 4, 1] * 5, 2)
    for _ in range(3):
        rest(here)
    assert here.schedule.waiting_count == 1
    assert 8 in here.schedule.cached_tokens()[1] or 7 in here.schedule.cached_tokens()[1]
    here.drain()
    assert waiting in here.finished


def test_the_latest_is_set_back_and_goes_on_where_it_was() -> None:
    here = world(140, lane_count=3)
    sequences = [submit(here, [n, 1, 2, 3, 3], 30) for n in range(4)]
    here.drain()
    assert here.finished[0] is sequences[0]
    assert sequences[0].attempt == 0
    assert any(s.attempt for s in sequences)
    # What it re-used of its own is nothing the client's prompt shared with another.
    assert all(s.reused <= s.prompt_count for s in sequences)
    assert [s.tokens for s in sequences] == [alone([n, 1, 2, 3, 3], 30) for n in range(4)]


def test_the_first_in_line_is_not_overtaken_for_ever() -> None:
    here = world(80)
    busy = submit(here, [1, 2, 3], 20)
    rest(here)
    large = submit(here, [2] * 20, 8)
    turn = 0
    while large not in here.finished:
        turn += 1
        assert turn < 200
        if turn % 3 == 0:
            submit(here, [turn % 5, 3], 2)
        rest(here)
    assert busy in here.finished
    here.drain()


def test_nothing_is_left_to_the_ring_after_the_last_one_ended() -> None:
    here = world()
    sequence = submit(here, [1, 2, 3, 4, 4, 4, 4, 4], 5)
    here.issue()
    here.end(sequence)
    while here.issued:
        here.arrive()
    tidy = here.issue()
    assert tidy is not None
    assert tidy.commands == [[Command.CLOSE, sequence.sequence_id]]
    assert here.issue() is None
    assert here.schedule.is_idle


def test_one_set_back_while_its_token_is_on_its_way_computes_it_anew() -> None:
    here = world(lane_count=1, window=3)
    sequence = submit(here, [1, 2, 3, 4], 10)
    while sequence.in_lane is None or not here.issued:
        if here.issue() is None:
            here.arrive()
    here.schedule._set_back()
    # It begins anew before the old step comes back.
    assert here.issue() is not None
    here.drain()
    assert sequence.attempt == 1
    assert here.finished == [sequence]


def test_what_is_kept_is_what_the_caches_hold_while_steps_are_on_their_way() -> None:
    here = world(fixed=3, ahead=True, lane_count=1, window=2)
    sequence = submit(here, [1, 2, 3, 4], 10)
    while sum(isinstance(step, Decode) for step in here.issued) < 2:
        if here.issue() is None:
            here.arrive()
    here.end(sequence, keep=True)
    here.drain()
    lengths = sorted(len(cache) for cache in here.ring.kept.values())
    assert lengths == sorted(here.schedule.cached_tokens()[1])
