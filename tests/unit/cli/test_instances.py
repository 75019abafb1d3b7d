"""Which instances there are, which of them will do, and how a question is put."""

from dataclasses import replace

import pytest

from services.cli.asking import Question, generate_request
from services.cli.census import Census, merge_views
from services.cli.instances import Wanted, ready_instances
from services.common.errors import Reason, ShardringError
from shardring.placement.v1 import placement_pb2, placement_service_pb2
from shardring.runner.v1 import runner_pb2

STATES = runner_pb2.InstanceState


def instance(
    instance_id: str,
    *node_ids: str,
    rank: int = 0,
    created: int = 0,
    state: STATES.ValueType = runner_pb2.INSTANCE_STATE_READY,
    requests: int = 0,
) -> runner_pb2.Instance:
    made = runner_pb2.Instance(
        instance_id=instance_id,
        placement=placement_pb2.Placement(
            model_id="org/m",
            commit="c1",
            ranks=[
                placement_pb2.RankAssignment(rank=index, node_id=node_id)
                for index, node_id in enumerate(node_ids)
            ],
        ),
        rank=rank,
        state=state,
        request_count=requests,
    )
    made.create_time.FromSeconds(created)
    return made


def wanted(minimum: int = 0, required: str = "", excluded: str = "") -> Wanted:
    constraints = placement_service_pb2.PlacementConstraints(
        min_node_count=minimum,
        required_node_ids=list(required),
        excluded_node_ids=list(excluded),
    )
    return Wanted("org/m", "", constraints)


def ids_of(instances: list[runner_pb2.Instance]) -> list[str]:
    return [one.instance_id for one in instances]


def test_the_heads_view_counts_whoever_answers_first() -> None:
    head = instance("i", "a", "b", state=runner_pb2.INSTANCE_STATE_FAILED)
    other = instance("i", "a", "b", rank=1, created=5)
    assert merge_views([[other], [head]]) == merge_views([[head], [other]]) == [head]
    assert merge_views([[other], []]) == [other]


def test_of_two_placements_under_one_id_the_newer_counts() -> None:
    old = instance("i", "a", created=1, state=runner_pb2.INSTANCE_STATE_STOPPED)
    new = instance("i", "b", "c", rank=1, created=9)
    assert merge_views([[old], [new]]) == [new]


def test_newest_first() -> None:
    views = [[instance("old", "a", created=1)], [instance("new", "b", created=2)]]
    assert ids_of(merge_views(views)) == ["new", "old"]


def test_an_unknown_instance_names_running_ones_and_silent_nodes() -> None:
    silent = ShardringError(Reason.SERVICE_UNAVAILABLE, "gone")
    over = instance("over", "a", state=runner_pb2.INSTANCE_STATE_STOPPED)
    census = Census([instance("i", "a"), over], {}, {"mini": silent})
    assert census.find("over") is over
    with pytest.raises(ShardringError) as caught:
        census.find("x")
    assert caught.value.reason is Reason.INSTANCE_NOT_FOUND
    assert "Running: i." in caught.value.message
    assert "unreachable: mini" in caught.value.message


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (wanted(), ["idle", "three", "busy"]),
        (wanted(minimum=3), ["three"]),
        (wanted(required="ac"), ["three"]),
        (wanted(excluded="c"), ["idle", "busy"]),
        (wanted(required="d"), []),
        (Wanted("org/other", "", placement_service_pb2.PlacementConstraints()), []),
    ],
)
def test_ready_instances_fulfil_what_is_wanted(asked: Wanted, expected: list[str]) -> None:
    census = Census(
        [
            instance("busy", "a", "b", requests=3),
            instance("idle", "a", "b"),
            instance("three", "a", "b", "c", requests=1),
            instance("starting", "a", state=runner_pb2.INSTANCE_STATE_STARTING),
            # Its head was silent: it may be gone.
            instance("headless", "a", "b", rank=1),
        ],
        {},
        {},
    )
    assert ids_of(ready_instances(census, asked, "")) == expected
    assert ids_of(ready_instances(census, asked, "c1")) == expected
    assert ready_instances(census, asked, "c2") == []


def test_a_ready_instance_keeps_its_cache_as_is_wanted() -> None:
    quantized = instance("quantized", "a")
    quantized.options.cache_bits, quantized.options.max_cache_token_count = 4, 512
    census = Census([instance("exact", "a"), quantized], {}, {})
    options = runner_pb2.InstanceOptions
    for asked, expected in (
        (options(), ["exact", "quantized"]),
        (options(cache_bits=4), ["quantized"]),
        (options(max_cache_token_count=512), ["quantized"]),
        (options(cache_bits=4, max_cache_token_count=256), []),
    ):
        found = ready_instances(census, replace(wanted(), options=asked), "")
        assert ids_of(found) == expected


def question(**given: object) -> Question:
    usual: dict[str, object] = {
        "prompt": "hi",
        "system": "",
        "raw": False,
        "temperature": 0.0,
        "top_p": None,
        "top_k": 0,
        "min_p": 0.0,
        "seed": None,
        "max_tokens": 0,
    }
    return Question(**(usual | given))  # type: ignore[arg-type]


def test_chat_with_a_template_else_plain() -> None:
    chat = instance("i", "a")
    chat.has_chat_template = True
    request = generate_request(chat, question(system="Be brief."))
    turns = [(turn.role, turn.content) for turn in request.input.messages.messages]
    assert turns == [("system", "Be brief."), ("user", "hi")]
    assert generate_request(chat, question(raw=True)).input.prompt == "hi"
    assert generate_request(instance("i", "a"), question()).input.prompt == "hi"
    with pytest.raises(ShardringError, match="beside --raw"):
        question(raw=True, system="Be brief.")
    with pytest.raises(ShardringError, match="without chat template"):
        generate_request(instance("i", "a"), question(system="Be brief."))


def test_what_was_not_given_stays_unset() -> None:
    sampling = generate_request(instance("i", "a"), question()).sampling
    assert not sampling.HasField("top_p")
    assert not sampling.HasField("seed")
    sampling = generate_request(instance("i", "a"), question(top_p=0.0, seed=0)).sampling
    assert sampling.HasField("top_p")
    assert sampling.HasField("seed")
    assert not sampling.HasField("repetition_penalty")
    request = generate_request(instance("i", "a"), question())
    assert not request.HasField("top_logprob_count")
    assert request.choice_count == 1


def test_settings_are_put_where_they_belong() -> None:
    request = generate_request(
        instance("i", "a"),
        question(
            stop=("\n", "END"),
            repetition_penalty=1.5,
            frequency_penalty=-1.0,
            presence_penalty=0.5,
            logit_bias=("7=-100", "0=+2.5", "7=3"),
            logprobs=0,
            choices=3,
        ),
    )
    assert list(request.stop.texts) == ["\n", "END"]
    sampling = request.sampling
    assert sampling.repetition_penalty == 1.5
    assert (sampling.frequency_penalty, sampling.presence_penalty) == (-1, 0.5)
    assert dict(sampling.logit_bias) == {7: 3, 0: 2.5}
    assert request.HasField("top_logprob_count")
    assert (request.top_logprob_count, request.choice_count) == (0, 3)


@pytest.mark.parametrize("bias", ["7", "=1", "x=1", "-1=1", "7=", "7=a", "7=nan", "9999999999=1"])
def test_a_bias_that_is_none_is_refused(bias: str) -> None:
    with pytest.raises(ShardringError, match="ID=VALUE, such as 42=-100") as refusal:
        question(logit_bias=(bias,))
    assert refusal.value.metadata["field"] == "logit_bias"


def test_no_answers_are_refused() -> None:
    with pytest.raises(ShardringError, match="1 or more"):
        question(choices=0)
