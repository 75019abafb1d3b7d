"""Which instances a gateway is given, and how they are told apart."""

import importlib.util
import json

import pytest

from services.cli.census import Census
from services.cli.gateway.smg import SmgError, check_installed
from services.cli.gateway.workers import Worker, kept, manifest, workers_of
from services.common.addresses import HostPort
from shardring.common.v1 import common_pb2
from shardring.placement.v1 import placement_pb2
from shardring.runner.v1 import runner_pb2

READY = runner_pb2.INSTANCE_STATE_READY


def instance(
    name: str,
    *addresses: str,
    state: runner_pb2.InstanceState.ValueType = READY,
    rank: int = 0,
    port: int = 65001,
    model: str = "org/model",
    started: int = 7,
) -> runner_pb2.Instance:
    endpoints = [
        common_pb2.Endpoint(address=address, port=52420) for address in addresses or ("192.0.2.1",)
    ]
    head = placement_pb2.RankAssignment(node_id="head", endpoints=endpoints)
    made = runner_pb2.Instance(
        instance_id=name,
        placement=placement_pb2.Placement(model_id=model, ranks=[head]),
        state=state,
        rank=rank,
        mlx_engine_port=port,
    )
    made.create_time.FromNanoseconds(started)
    return made


def workers(*instances: runner_pb2.Instance, models: tuple[str, ...] = ()) -> dict[str, Worker]:
    return workers_of(Census(list(instances), {}, {}), models)


def test_ready_instances_are_workers() -> None:
    found = workers(
        instance("good"),
        instance("starting", state=runner_pb2.INSTANCE_STATE_STARTING),
        instance("ended", state=runner_pb2.INSTANCE_STATE_STOPPED),
        # Only the head answers requests, and knows that it does.
        instance("seen-from-afar", rank=1),
        instance("no-port-yet", port=0),
    )
    assert [worker.instance_id for worker in found.values()] == ["good"]


def test_only_the_models_asked_for() -> None:
    both = (instance("a", model="org/a"), instance("b", model="org/b"))
    found = workers(*both, models=("org/b", "org/c"))
    assert [worker.instance_id for worker in found.values()] == ["b"]


def test_another_start_of_an_instance_is_another_worker() -> None:
    assert workers(instance("a", started=1)).keys().isdisjoint(workers(instance("a", started=2)))


def test_addresses_in_their_order_without_zones() -> None:
    [worker] = workers(instance("a", "fe80::1%en0", "2001:db8::1", "192.0.2.1")).values()
    assert worker.addresses == (HostPort("2001:db8::1", 65001), HostPort("192.0.2.1", 65001))


def test_a_head_that_does_not_answer_keeps_its_workers() -> None:
    before = workers(instance("a"), instance("b"))
    assert kept(before, {}, ["head"]) == before
    assert kept(before, {}, ["other"]) == {}
    now = workers(instance("c"))
    assert kept(before, now, []) == now


def test_the_manifest_names_each_worker_once_in_order() -> None:
    told = manifest({"b@2": HostPort("2001:db8::1", 65002), "a@1": HostPort("192.0.2.1", 65001)})
    assert json.loads(json.dumps(told)) == {
        "version": 1,
        "workers": [
            {"id": "a@1", "url": "grpc://192.0.2.1:65001"},
            {"id": "b@2", "url": "grpc://[2001:db8::1]:65002"},
        ],
    }


def test_without_smg_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    check_installed()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SmgError, match=r"pip install 'shardring\[gateway\]'"):
        check_installed()
