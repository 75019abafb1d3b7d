"""The head with a real model, alone in this process: many at once, and little room."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from services.cli.walkthrough import MODEL, MODELS
from services.runner.child_protocol import Event, Finished, Run, Tokens
from services.runner.domain import schedule as schedules
from services.runner.domain.cache_room import CacheCost, CacheRoom
from services.runner.domain.request import Sampling, Stop
from services.runner.domain.schedule import Schedule
from services.runner.domain.steps import Decode, Prefill, Step
from services.runner.engine.head import Head
from services.runner.engine.line import Alone
from services.runner.engine.loader import load_stage
from services.runner.engine.spans import SequenceSpans
from services.runner.engine.text import Tokenizer
from services.runner.engine.work import Model, Work

LAYERS = 8


@pytest.fixture(scope="module")
def model() -> Model:
    return load_stage(MODELS / MODEL, 0, LAYERS)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(MODELS / MODEL)


class Watched(Schedule):
    """Keeps what it issued, and calls `before_step` each time it is asked."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.log: list[Step] = []
        self.set_back_count = 0

    def next_step(self) -> Step | None:
        step = super().next_step()
        if step is not None:
            self.log.append(step)
        self.set_back_count = max([self.set_back_count, *(s.attempt for s in self.running)])
        return step


def serve(
    model: Model,
    tokenizer: Tokenizer,
    runs: list[Run],
    *,
    room_tokens: int = 10**9,
    ahead: bool = True,
    exact_alone: bool = False,
    chunk: int = 256,
    batched: bool = True,
    later: Callable[[Head, Watched], None] | None = None,
    **options: int,
) -> tuple[dict[str, tuple[list[int], str]], Watched, list[Event]]:
    """Answer requests, with room for so many tokens; return tokens and texts by request."""
    work = Work(model, hands_on=False, chooses=True, spans=SequenceSpans(0), **options)
    room = CacheRoom([CacheCost(0, ((1, 0),), room_tokens)])
    schedule = Watched(
        room, lane_count=2, window=3, ahead=ahead, batched=batched, chunk_tokens=chunk
    )
    events: list[Event] = []
    head = Head(
        Alone(work),
        work,
        schedule,
        room,
        tokenizer,
        events.append,
        exact_alone=exact_alone,
    )
    for run in runs:
        head.submit(run)
    while head.step(None):
        if later is not None:
            later(head, schedule)
    assert work.sequence_count == 0
    assert work.lanes.bytes_in_use == 0
    assert schedule.is_idle
    answers: dict[str, tuple[list[int], str]] = {}
    for event in events:
        if isinstance(event, Tokens):
            for name, ids, text, _ in event.pieces:
                known, before = answers.get(name, ([], ""))
                answers[name] = ([*known, *ids], before + text)
        elif isinstance(event, Finished):
            known, before = answers.get(event.request_id, ([], ""))
            answers[event.request_id] = (known, before + event.text)
    return answers, schedule, events


def run(name: str, prompt: list[int], count: int, **sampling: Any) -> Run:
    stop = Stop(ignore_end_tokens=True)
    return Run(name, tuple(prompt), Sampling(**sampling), stop, max_token_count=count)


MIXED = [
    run(
        f"{n}",
        [(n * 37 + i * 11) % 900 + 20 for i in range(1 + n * 23 % 90)],
        12 + n % 3 * 12,
        **({} if n % 2 else {"temperature": 1.5, "seed": n, "repeatable": True}),
        **({"repetition_penalty": 1.3} if n % 3 == 0 else {}),
    )
    for n in range(7)
]


@pytest.fixture(scope="module")
def expected(model: Model, tokenizer: Tokenizer) -> dict[str, tuple[list[int], str]]:
    """What each gets alone."""
    answers: dict[str, tuple[list[int], str]] = {}
    for each in MIXED:
        answers |= serve(model, tokenizer, [each])[0]
    assert [len(answers[each.request_id][0]) for each in MIXED] == [
        each.max_token_count for each in MIXED
    ]
    return answers


@pytest.mark.parametrize("exact_alone", [False, True])
@pytest.mark.parametrize("ahead", [False, True])
def test_many_at_once_get_what_each_gets_alone(
    model: Model,
    tokenizer: Tokenizer,
    expected: dict[str, tuple[list[int], str]],
    ahead: bool,
    exact_alone: bool,
) -> None:
    answers, schedule, _ = serve(
        model, tokenizer, MIXED, ahead=ahead, exact_alone=exact_alone, chunk=32
    )
    assert answers == expected
    rows = [step.sequences for step in schedule.log if isinstance(step, Decode)]
    assert max(map(len, rows)) > 1
    if exact_alone:
        assert all(len(row) == 1 for row in rows if any(s.exact for s in row))


@pytest.mark.parametrize("exact_alone", [False, True])
@pytest.mark.parametrize("ahead", [False, True])
def test_those_set_back_go_on_as_if_nothing_had_been(
    model: Model,
    tokenizer: Tokenizer,
    expected: dict[str, tuple[list[int], str]],
    ahead: bool,
    exact_alone: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Have them grow token by token, so that they run out of room on their way.
    monkeypatch.setattr(schedules, "_GROWTH_TOKENS", 1)
    monkeypatch.setattr(schedules, "round_up", lambda count: count)
    monkeypatch.setattr(CacheCost, "bytes_for", lambda _, count: count)
    answers, schedule, events = serve(
        model, tokenizer, MIXED, room_tokens=150, ahead=ahead, exact_alone=exact_alone, chunk=32
    )
    assert schedule.set_back_count
    assert answers == expected
    cached = {e.request_id: e.cached_token_count for e in events if isinstance(e, Finished)}
    assert all(cached[each.request_id] < len(each.prompt_token_ids) for each in MIXED)


def test_others_get_tokens_between_the_chunks_of_a_long_prompt(
    model: Model, tokenizer: Tokenizer
) -> None:
    short = [run(name, [50 + i, 60], 60) for i, name in enumerate("abc")]
    long = run("long", [(i * 7) % 900 + 20 for i in range(260)], 3)
    came = False

    def later(head: Head, schedule: Watched) -> None:
        nonlocal came
        if not came and sum(isinstance(step, Decode) for step in schedule.log) == 8:
            came = True
            head.submit(long)

    _, schedule, _ = serve(model, tokenizer, short, chunk=16, later=later)
    chunks = [
        place
        for place, step in enumerate(schedule.log)
        if isinstance(step, Prefill) and len(step.sequence.tokens) > 200
    ]
    assert len(chunks) == 17
    for one, other in pairwise(chunks):
        between = schedule.log[one + 1 : other]
        assert between
        steps = [step for step in between if isinstance(step, Decode)]
        assert {s.sequence_id for step in steps for s in step.sequences} == {1, 2, 3}


def test_sequences_that_are_not_batched_get_the_same(
    model: Model, tokenizer: Tokenizer, expected: dict[str, tuple[list[int], str]]
) -> None:
    answers, schedule, _ = serve(model, tokenizer, MIXED, batched=False)
    assert answers == expected
    steps = [step for step in schedule.log if isinstance(step, Decode)]
    assert all(len(step.sequences) == 1 for step in steps)


def test_windows_give_the_same_alone_and_batched(model: Model, tokenizer: Tokenizer) -> None:
    alone: dict[str, tuple[list[int], str]] = {}
    for each in MIXED:
        alone |= serve(model, tokenizer, [each], max_cache_tokens=24)[0]
    answers, schedule, _ = serve(model, tokenizer, MIXED, max_cache_tokens=24)
    assert answers == alone
    assert any(len(step.sequences) > 2 for step in schedule.log if isinstance(step, Decode))
