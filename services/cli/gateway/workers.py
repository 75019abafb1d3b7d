"""Which instances a gateway should send requests to."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from services.cli.census import Census
from services.common.addresses import HostPort
from shardring.runner.v1 import runner_pb2


@dataclass(frozen=True)
class Worker:
    """One READY instance, as a gateway sees it.

    `key` differs between two starts of an instance under one id. `addresses` are those at which
    the head may be reached, likeliest first.
    """

    key: str
    instance_id: str
    model_id: str
    head_node_id: str
    addresses: tuple[HostPort, ...]


def workers_of(census: Census, models: Collection[str]) -> dict[str, Worker]:
    """Return the instances that are READY and served to gateways, by key; `models` empty: of all
    models. Only what a head itself says counts."""
    found = [
        _worker(instance)
        for instance in census.instances
        if instance.rank == 0
        and instance.state == runner_pb2.INSTANCE_STATE_READY
        and instance.mlx_engine_port
        and (not models or instance.placement.model_id in models)
    ]
    return {worker.key: worker for worker in found}


def kept(
    before: Mapping[str, Worker], now: Mapping[str, Worker], unreachable: Collection[str]
) -> dict[str, Worker]:
    """Return `now`, and of `before` those whose heads, by node id, gave no answer this time.

    Their requests may be under way: an answer that is late is no end. If it is one, the gateway
    notices it as fast.
    """
    late = {key: worker for key, worker in before.items() if worker.head_node_id in unreachable}
    return {**late, **now}


def _worker(instance: runner_pb2.Instance) -> Worker:
    head = instance.placement.ranks[0]
    return Worker(
        key=f"{instance.instance_id}@{instance.create_time.ToNanoseconds()}",
        instance_id=instance.instance_id,
        model_id=instance.placement.model_id,
        head_node_id=head.node_id,
        addresses=tuple(
            HostPort(endpoint.address, instance.mlx_engine_port)
            for endpoint in head.endpoints
            # A zone is of the machine it was read on, and has no place in a URL.
            if "%" not in endpoint.address
        ),
    )


def manifest(workers: Mapping[str, HostPort]) -> dict[str, object]:
    """Return what smg's file discovery reads; `workers`: key -> address."""
    return {
        "version": 1,
        "workers": [
            {"id": key, "url": worker_url(address)} for key, address in sorted(workers.items())
        ],
    }


def worker_url(address: HostPort) -> str:
    """Return how smg is told of a gRPC worker."""
    return f"grpc://{address}"
