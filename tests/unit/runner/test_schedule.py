"""The schedule: whatever comes in whatever order, every sequence gets what it would get alone."""

from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.runner.domain import cache_room, prefixes, schedule
from services.runner.domain.cache_room import CacheCost
from services.runner.domain.schedule import Command, Decode, Prefill, Sequence
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
beginnings = st.sampled_from([[], [1, 2, 3, 4, 0, 1], [1, 2, 3, 4, 0, 1, 2, 2, 3, 1, 0, 4], [3] * 9])
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
