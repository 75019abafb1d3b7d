"""What a placement and a request have to hold to."""

from dataclasses import replace

import pytest

from services.common.addresses import HostPort
from services.common.errors import Reason, ShardringError
from services.runner.domain.request import (
    GenerationRequest,
    Input,
    Message,
    Sampling,
    Stop,
    check_input,
    check_max_token_count,
    check_request,
    check_sampling,
)
from services.runner.domain.ring import Rank, Ring, check_ring

HOSTS = ("0.0.0.0:61000", "127.0.0.1:61001")


def rank(index: int, start: int, end: int) -> Rank:
    endpoint = HostPort("127.0.0.1", 52420 + index)
    return Rank(index, f"id{index}", f"n{index}", (endpoint,), (start, end), HOSTS, 1)


def hosts_of(index: int, *hosts: str) -> Rank:
    return replace(RING.ranks[index], hosts=hosts)


RING = Ring("org/name", "c0ffee", 4, (rank(0, 0, 3), rank(1, 3, 4)))


def test_a_sound_ring_passes() -> None:
    check_ring(RING)


@pytest.mark.parametrize(
    ("field", "ring"),
    [
        ("placement.model_id", replace(RING, model_id="")),
        ("placement.ranks", replace(RING, ranks=())),
        ("placement.ranks.node_id", replace(RING, ranks=(RING.ranks[0], RING.ranks[0]))),
        ("placement.ranks[1].rank", replace(RING, ranks=(rank(0, 0, 3), rank(2, 3, 4)))),
        ("placement.ranks[1].layers", replace(RING, ranks=(rank(0, 0, 2), rank(1, 3, 4)))),
        ("placement.ranks[1].layers", replace(RING, ranks=(rank(0, 0, 4), rank(1, 4, 4)))),
        ("placement.layer_count", replace(RING, layer_count=5)),
        ("placement.ranks[0].hosts", replace(RING, ranks=(replace(rank(0, 0, 4)),))),
        (
            "placement.ranks[0].endpoints",
            replace(RING, ranks=(replace(rank(0, 0, 3), endpoints=()), rank(1, 3, 4))),
        ),
        (
            "placement.ranks[0].hosts[1]",
            replace(RING, ranks=(hosts_of(0, "0.0.0.0:61000", "bob:61001"), RING.ranks[1])),
        ),
        (
            "placement.ranks[0].hosts[0].port",
            replace(RING, ranks=(hosts_of(0, "0.0.0.0:0", "127.0.0.1:61001"), RING.ranks[1])),
        ),
        (
            "placement.ranks[0].hosts[1]",
            replace(RING, ranks=(hosts_of(0, "0.0.0.0:61000", "127.0.0.1:7"), RING.ranks[1])),
        ),
        (
            "placement.ranks[1].endpoints[0].port",
            replace(
                RING,
                ranks=(RING.ranks[0], replace(RING.ranks[1], endpoints=(HostPort("::1", 0),))),
            ),
        ),
        (
            "placement.ranks[1].weight_bytes",
            replace(RING, ranks=(RING.ranks[0], replace(RING.ranks[1], weight_bytes=-1))),
        ),
    ],
)
def test_an_unsound_ring_is_refused(field: str, ring: Ring) -> None:
    with pytest.raises(ShardringError) as refusal:
        check_ring(ring)
    assert refusal.value.reason is Reason.INVALID_FIELD
    assert refusal.value.metadata["field"] == field


@pytest.mark.parametrize(
    ("field", "sampling"),
    [
        ("sampling.temperature", Sampling(temperature=-0.1)),
        ("sampling.temperature", Sampling(temperature=10.5)),
        ("sampling.temperature", Sampling(temperature=float("nan"))),
        ("sampling.temperature", Sampling(temperature=float("inf"))),
        ("sampling.top_p", Sampling(top_p=0)),
        ("sampling.top_p", Sampling(top_p=1.01)),
        ("sampling.top_p", Sampling(top_p=float("nan"))),
        ("sampling.top_k", Sampling(top_k=-1)),
        ("sampling.min_p", Sampling(min_p=-0.5)),
        ("sampling.min_p", Sampling(min_p=2)),
        ("sampling.seed", Sampling(seed=-1)),
        ("sampling.repetition_penalty", Sampling(repetition_penalty=0)),
        ("sampling.repetition_penalty", Sampling(repetition_penalty=10.5)),
        ("sampling.repetition_penalty", Sampling(repetition_penalty=float("nan"))),
        ("sampling.frequency_penalty", Sampling(frequency_penalty=-2.5)),
        ("sampling.frequency_penalty", Sampling(frequency_penalty=float("inf"))),
        ("sampling.presence_penalty", Sampling(presence_penalty=2.01)),
        ("sampling.logit_bias", Sampling(logit_bias=((-1, 1.0),))),
        ("sampling.logit_bias[5]", Sampling(logit_bias=((4, 100.0), (5, 100.5)))),
        ("sampling.logit_bias[5]", Sampling(logit_bias=((5, float("nan")),))),
        ("sampling.logit_bias", Sampling(logit_bias=tuple((i, 0.0) for i in range(1025)))),
    ],
)
def test_absurd_sampling_is_refused(field: str, sampling: Sampling) -> None:
    with pytest.raises(ShardringError) as refusal:
        check_sampling(sampling)
    assert refusal.value.reason is Reason.INVALID_FIELD
    assert refusal.value.metadata["field"] == field


def test_sound_sampling_passes() -> None:
    check_sampling(Sampling())
    check_sampling(Sampling(temperature=10, top_p=0.01, top_k=5, min_p=1, seed=2**63 - 1))
    check_sampling(Sampling(repetition_penalty=10, frequency_penalty=-2, presence_penalty=2))
    check_sampling(Sampling(logit_bias=tuple((i, -100.0) for i in range(1024))))


HELLO = Input(prompt="hello")


@pytest.mark.parametrize(
    ("field", "request_"),
    [
        ("input", GenerationRequest(Input())),
        ("sampling.top_k", GenerationRequest(HELLO, Sampling(top_k=-1))),
        ("max_token_count", GenerationRequest(HELLO, max_token_count=-1)),
        ("stop.texts", GenerationRequest(HELLO, stop=Stop(texts=("x",) * 17))),
        ("stop.texts[1]", GenerationRequest(HELLO, stop=Stop(texts=("x", "")))),
        ("stop.texts[0]", GenerationRequest(HELLO, stop=Stop(texts=("é" * 501,)))),
        ("stop.token_ids", GenerationRequest(HELLO, stop=Stop(token_ids=(1,) * 65))),
        ("stop.token_ids", GenerationRequest(HELLO, stop=Stop(token_ids=(1, -1)))),
        ("top_logprob_count", GenerationRequest(HELLO, top_logprob_count=-1)),
        ("top_logprob_count", GenerationRequest(HELLO, top_logprob_count=21)),
        ("choice_count", GenerationRequest(HELLO, choice_count=0)),
        ("choice_count", GenerationRequest(HELLO, choice_count=17)),
    ],
)
def test_an_absurd_request_is_refused(field: str, request_: GenerationRequest) -> None:
    with pytest.raises(ShardringError) as refusal:
        check_request(request_)
    assert refusal.value.reason is Reason.INVALID_FIELD
    assert refusal.value.metadata["field"] == field


def test_a_sound_request_passes() -> None:
    check_request(GenerationRequest(HELLO))
    stop = Stop(texts=("é" * 500,) * 16, token_ids=(0, *(2**31 - 1,) * 63), ignore_end_tokens=True)
    sampling = Sampling(seed=2**63 - 1)
    check_request(GenerationRequest(HELLO, sampling, stop, 5, 0, 16))
    check_request(GenerationRequest(HELLO, top_logprob_count=20))


@pytest.mark.parametrize("count", [-1, 10**9])
def test_an_absurd_token_limit_is_refused(count: int) -> None:
    with pytest.raises(ShardringError):
        check_max_token_count(count)


@pytest.mark.parametrize(
    "given",
    [
        Input(),
        Input(messages=()),
        Input(messages=(Message("", "hello"),)),
        Input(prompt="x" * (16 * 2**20 + 1)),
    ],
)
def test_an_input_that_is_none_is_refused(given: Input) -> None:
    with pytest.raises(ShardringError) as refusal:
        check_input(given)
    assert refusal.value.reason is Reason.INVALID_FIELD
