"""The state of an instance follows from its ranks'."""

import pytest

from services.runner.domain.state import InstanceState, instance_state
from services.runner.domain.state import ShardState as S
from shardring.runner.v1 import runner_pb2


@pytest.mark.parametrize(
    ("shards", "expected"),
    [
        ([S.READY, S.READY], InstanceState.READY),
        ([S.READY, S.WARMING_UP], InstanceState.STARTING),
        ([S.READY, S.STOPPING], InstanceState.STOPPING),
        ([S.STOPPED, S.STOPPING], InstanceState.STOPPING),
        ([S.STOPPED, S.STOPPED], InstanceState.STOPPED),
        ([S.FAILED, S.READY], InstanceState.FAILED),
        ([S.FAILED, S.STOPPED], InstanceState.FAILED),
    ],
)
def test_instance_state(shards: list[S], expected: InstanceState) -> None:
    assert instance_state(shards) is expected


def test_states_are_those_of_the_proto() -> None:
    shard = {name: value for name, value in runner_pb2.ShardState.items() if value}
    assert shard == {f"SHARD_STATE_{state.name}": state.value for state in S}
    instance = {name: value for name, value in runner_pb2.InstanceState.items() if value}
    assert instance == {f"INSTANCE_STATE_{state.name}": state.value for state in InstanceState}
