"""Tokens are mlx-lm's choice, and no sequence's depend on what is chosen beside it."""

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import make_logits_processors
from mlx_lm.utils import load_model

from services.cli.walkthrough import MODEL, MODELS
from services.runner.domain.request import Sampling
from services.runner.engine.sampling import LOWEST_LOGPROB, ChosenToken, Sampler, choose, unpack

PROMPT = [1, 4, 300, 12, 300, 77, 5, 301, 302, 303, 300, 12]
STEPS = 24
SAMPLED = Sampling(temperature=1.5, top_p=0.95, top_k=200, min_p=0.001, seed=7)
GREEDY: dict[str, tuple[Sampling, dict[str, Any]]] = {
    "plain": (Sampling(), {}),
    "repetition": (Sampling(repetition_penalty=1.7), {"repetition_penalty": 1.7}),
    "encouraged": (Sampling(repetition_penalty=0.5), {"repetition_penalty": 0.5}),
    "frequency": (Sampling(frequency_penalty=1.5), {"frequency_penalty": 1.5}),
    "presence": (Sampling(presence_penalty=2.0), {"presence_penalty": 2.0}),
    "bias": (
        Sampling(logit_bias=((70, 9.5), (71, 9.0), (2, -100.0))),
        {"logit_bias": {70: 9.5, 71: 9.0, 2: -100.0}},
    ),
    "all": (
        Sampling(
            repetition_penalty=1.2,
            frequency_penalty=0.3,
            presence_penalty=-0.5,
            logit_bias=((70, 3.0),),
        ),
        {
            "repetition_penalty": 1.2,
            "frequency_penalty": 0.3,
            "presence_penalty": -0.5,
            "logit_bias": {70: 3.0},
        },
    ),
}


@pytest.fixture(scope="module")
def model() -> Any:
    return load_model(MODELS / MODEL)[0]


@pytest.fixture(scope="module")
def plain(model: Any) -> list[int]:
    return [token for token, _ in generate_step(mx.array(PROMPT), model, max_tokens=STEPS)]


def logits_of(model: Any, tokens: list[int]) -> mx.array:
    """Return the logits [1, vocabulary] of what follows."""
    logits: mx.array = model(mx.array([tokens]))[:, -1, :]
    return logits


def random_logits(count: int, vocabulary: int = 50, seed: int = 3) -> mx.array:
    return mx.random.normal((count, vocabulary), key=mx.random.key(seed)) * 2


def one(logits: mx.array, sampler: Sampler) -> ChosenToken:
    (chosen,) = unpack(numbers(choose(logits, [sampler])), [sampler.top_logprob_count])
    return chosen


def numbers(chosen: mx.array) -> list[int]:
    assert chosen.dtype == mx.int32
    found: Any = chosen.tolist()
    return list(found)


def run(sampling: Sampling, tokens: list[int], logits: mx.array, steps: int = STEPS) -> list[int]:
    """Choose from the same logits again and again; return the tokens."""
    sampler = Sampler(sampling, tokens)
    return [one(logits, sampler).token_id for _ in range(steps)]


@pytest.mark.parametrize("name", GREEDY)
def test_greedy_tokens_are_those_of_mlx_lm(model: Any, plain: list[int], name: str) -> None:
    sampling, settings = GREEDY[name]
    processors = make_logits_processors(**settings)
    expected = [
        token
        for token, _ in generate_step(
            mx.array(PROMPT), model, max_tokens=STEPS, logits_processors=processors
        )
    ]
    sampler, tokens = Sampler(sampling, PROMPT), list(PROMPT)
    for _ in range(STEPS):
        tokens.append(one(logits_of(model, tokens), sampler).token_id)
    assert tokens[len(PROMPT) :] == expected
    # Else it would show nothing.
    assert sampling == Sampling() or expected != plain


@pytest.mark.parametrize(
    "sampling",
    [
        SAMPLED,
        Sampling(temperature=1, seed=1),
        *(sampling for sampling, _ in GREEDY.values()),
        replace(SAMPLED, repetition_penalty=1.3, frequency_penalty=1, logit_bias=((3, 2.0),)),
    ],
)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_neighbours_change_nothing(sampling: Sampling, dtype: mx.Dtype) -> None:
    own = random_logits(1).astype(dtype)
    alone = run(sampling, [1, 2, 3], own)
    beside = [
        Sampler(Sampling(temperature=2, seed=7), [1, 2, 3], 5),
        Sampler(Sampling(repetition_penalty=3, presence_penalty=2), [9], 0),
        Sampler(Sampling(), []),
    ]
    sampler, together = Sampler(sampling, [1, 2, 3], 2), []
    for step in range(STEPS):
        # Others come and go.
        others = beside[: step % 4]
        rows = [random_logits(1, seed=step + i).astype(dtype) for i in range(len(others))]
        samplers = [*others, sampler]
        wanted = [each.top_logprob_count for each in samplers]
        chosen = unpack(numbers(choose(mx.concatenate([*rows, own]), samplers)), wanted)
        together.append(chosen[-1].token_id)
    assert together == alone


def test_a_random_token_depends_on_the_seed_and_the_place_alone() -> None:
    logits = random_logits(1)
    tokens = run(SAMPLED, [1, 2, 3], logits)
    assert len(set(tokens)) > 1
    assert run(SAMPLED, [1, 2, 3], logits) == tokens
    # Taken up again at another place, as after the prompt was computed anew.
    assert run(SAMPLED, [1, 2, 3, *tokens[:5]], logits, STEPS - 5) == tokens[5:]
    assert run(SAMPLED, [4, 5, 6], logits) == tokens
    assert run(replace(SAMPLED, seed=8), [1, 2, 3], logits) != tokens
    assert run(SAMPLED, [1, 2], logits)[1:] == tokens[:-1]
    # The place does not stand in for the seed.
    assert run(replace(SAMPLED, seed=8), [1, 2], logits) != tokens


def test_tokens_come_as_often_as_they_are_likely() -> None:
    probabilities = [0.5, 0.3, 0.15, 0.05]
    logits = mx.log(mx.array([probabilities]))
    for sampling, expected in (
        (Sampling(temperature=1, seed=4), probabilities),
        (Sampling(temperature=1, seed=4, top_k=2), [0.625, 0.375, 0, 0]),
        (Sampling(temperature=1, seed=4, top_p=0.7), [0.625, 0.375, 0, 0]),
        (Sampling(temperature=1, seed=4, min_p=0.25), [0.526, 0.316, 0.158, 0]),
    ):
        counts = Counter(run(sampling, [], logits, 1500))
        assert [counts[token] / 1500 for token in range(4)] == pytest.approx(expected, abs=0.05)


def test_the_next_token_may_be_chosen_before_the_last_is_known() -> None:
    sampling = replace(SAMPLED, repetition_penalty=2, frequency_penalty=1)
    settings = [sampling, Sampling(presence_penalty=1)]
    logits = random_logits(2)
    waiting, ahead = ([Sampler(each, [1, 2]) for each in settings] for _ in range(2))
    expected = [numbers(choose(logits, waiting)) for _ in range(STEPS)]
    chosen = [choose(logits, ahead) for _ in range(STEPS)]
    assert [numbers(tokens) for tokens in chosen] == expected


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize("count", [0, 1, 5, 20])
def test_log_probabilities_are_a_plain_log_softmax(dtype: mx.Dtype, count: int) -> None:
    logits = random_logits(1).astype(dtype)
    expected: list[float] = log_softmax(logits)
    for sampling in (Sampling(), replace(SAMPLED, top_k=3)):
        chosen = one(logits, Sampler(sampling, [], count))
        assert chosen.logprob == pytest.approx(expected[chosen.token_id], abs=1e-5)
        assert [logprob for _, logprob in chosen.top] == pytest.approx(
            sorted(expected, reverse=True)[:count], abs=1e-5
        )
        assert all(expected[i] == pytest.approx(p, abs=1e-5) for i, p in chosen.top)
        assert len({i for i, _ in chosen.top}) == count


def test_log_probabilities_are_those_after_penalties() -> None:
    logits = random_logits(1)
    penalised = mx.array(logits)
    penalised[:, 7] -= 1.5
    penalised[:, 9] += 4
    expected = log_softmax(penalised)
    sampling = Sampling(frequency_penalty=0.75, logit_bias=((9, 4.0),))
    chosen = one(logits, Sampler(sampling, [7, 7], 20))
    assert [expected[i] for i, _ in chosen.top] == pytest.approx(
        [logprob for _, logprob in chosen.top], abs=1e-5
    )
    assert mx.array_equal(logits, random_logits(1))


def log_softmax(logits: mx.array) -> list[float]:
    row: Any = logits[0].astype(mx.float32).tolist()
    total = math.log(sum(math.exp(value) for value in row))
    return [value - total for value in row]


def test_only_the_last_twenty_tokens_are_penalised() -> None:
    # Of tokens equally likely, the first that is not among the last twenty.
    sampler = Sampler(Sampling(presence_penalty=1), [0, *range(1, 21)])
    tokens = [one(mx.zeros((1, 50)), sampler).token_id for _ in range(30)]
    assert tokens == [count % 21 for count in range(30)]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "sampling", [Sampling(), SAMPLED, replace(SAMPLED, repetition_penalty=2, logit_bias=((0, 1),))]
)
def test_numbers_that_are_none_raise_nothing(value: float, sampling: Sampling) -> None:
    for logits in (mx.full((1, 50), value), mx.where(mx.arange(50)[None] < 2, value, 1.0)):
        chosen = one(logits, Sampler(sampling, [1], 20))
        assert 0 <= chosen.token_id < 50
        logprobs = [logprob for _, logprob in chosen.top]
        assert chosen.logprob is not None
        assert all(LOWEST_LOGPROB <= p <= 0 for p in [*logprobs, chosen.logprob])


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1, top_k=50),
        Sampling(temperature=1, top_k=10**6),
        Sampling(temperature=1, top_p=1e-40),
        Sampling(temperature=1e-40, top_p=1e-40),
        Sampling(temperature=1e-40),
        Sampling(temperature=1, min_p=1e-40),
        Sampling(temperature=10, min_p=1),
        Sampling(logit_bias=((50, 100.0), (2**31 - 1, 100.0), (-1, 100.0))),
        Sampling(repetition_penalty=1e-40),
    ],
)
def test_settings_at_the_edge_give_tokens(sampling: Sampling) -> None:
    logits = random_logits(1)
    # Tokens that the logits do not have, as where an embedding is larger than the head.
    tokens = run(sampling, [60, 2**31 - 1], logits, 5)
    assert all(0 <= token < 50 for token in tokens)
    if sampling.temperature < 1 or sampling.min_p == 1 or sampling.top_p < 1:
        best: Any = mx.argmax(logits).item()
        assert tokens == [best] * 5


def test_a_vocabulary_smaller_than_the_likeliest_asked_for() -> None:
    samplers = [Sampler(Sampling(), [], 20), Sampler(Sampling(), [], 1), Sampler(Sampling(), [])]
    chosen = unpack(numbers(choose(random_logits(3, vocabulary=3), samplers)), [20, 1, None])
    assert [len(each.top) for each in chosen] == [3, 1, 0]
    assert [each.token_id for each in chosen[:2]] == [each.top[0][0] for each in chosen[:2]]
    assert chosen[2].logprob is None
