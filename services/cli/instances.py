"""Bringing an instance up, finding a ready one, and stopping it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field

from services.cli.census import Census
from services.cli.client import Cluster
from services.cli.names import names_of_nodes
from services.cli.runner_client import RunnerClient
from services.common.errors import Reason, ShardringError
from services.common.status import error_from_proto
from shardring.placement.v1 import placement_pb2, placement_service_pb2
from shardring.runner.v1 import runner_pb2

# Ports are chosen by hash: one clash is rare, and a fifth in a row means something else is wrong.
PORT_ATTEMPTS = 5
_CLEANUP_SECONDS = 15.0

# Shows the changes of an instance and returns it once it is READY or over.
Follow = Callable[[AsyncIterator[runner_pb2.Instance]], Awaitable[runner_pb2.Instance]]


@dataclass(frozen=True)
class Wanted:
    """A model to run, what its ring must hold to, and how it is run. `revision` empty: "main"."""

    model_id: str
    revision: str
    constraints: placement_service_pb2.PlacementConstraints
    objective: placement_pb2.Objective.ValueType = placement_pb2.OBJECTIVE_UNSPECIFIED
    options: runner_pb2.InstanceOptions = field(default_factory=runner_pb2.InstanceOptions)


async def bring_up(
    cluster: Cluster,
    wanted: Wanted,
    instance_id: str,
    follow: Follow,
    warn: Callable[[str], None],
) -> runner_pb2.Instance:
    """Place a model, start it and follow it until it is READY.

    Raises what placing and starting raise, and the instance's own error when it FAILED. Whatever
    goes wrong, cancellation too, the instance is stopped again; `warn` is told if that fails.
    """
    head: RunnerClient | None = None
    try:
        for attempt in range(1, PORT_ATTEMPTS + 1):
            request_id = instance_id if attempt == 1 else f"{instance_id}-{attempt}"
            placement = await _place(cluster, wanted, request_id)
            head = cluster.head(placement)
            try:
                await head.start(instance_id, placement, wanted.options)
                break
            except ShardringError as error:
                if error.reason is not Reason.RING_PORT_IN_USE or attempt == PORT_ATTEMPTS:
                    raise
        assert head is not None
        async with aclosing(head.watch(instance_id)) as changes:
            instance = await follow(changes)
        if instance.state != runner_pb2.INSTANCE_STATE_READY:
            raise _why_over(instance)
        return instance
    except BaseException:
        if head is not None:
            await clean_up(head, instance_id, warn)
        raise


async def clean_up(head: RunnerClient, instance_id: str, warn: Callable[[str], None]) -> None:
    """Stop an instance on the way out, where an error must not hide the first one."""
    try:
        async with asyncio.timeout(_CLEANUP_SECONDS):
            await head.stop(instance_id)
    except ShardringError as error:
        if error.reason is not Reason.INSTANCE_NOT_FOUND:
            warn(f"Instance {instance_id} may still run: {error.message}")
    except TimeoutError:
        warn(f"Instance {instance_id} may still run: its head doesn't answer.")


def ready_instances(census: Census, wanted: Wanted, commit: str) -> list[runner_pb2.Instance]:
    """Return the READY instances that fulfil what is wanted, least busy first.

    `commit` empty: any. Only what the head itself says counts.
    """
    return sorted(
        (
            instance
            for instance in census.instances
            if instance.rank == 0
            and instance.state == runner_pb2.INSTANCE_STATE_READY
            and instance.placement.model_id == wanted.model_id
            and commit in ("", instance.placement.commit)
            and _fulfils(instance.placement, wanted)
            and _runs_so(instance.options, wanted.options)
        ),
        key=lambda instance: (instance.request_count, instance.instance_id),
    )


async def stop_instance(cluster: Cluster, census: Census, instance_id: str) -> runner_pb2.Instance:
    """Stop an instance by its head, or by whichever rank answers; return it as it then is.

    Raises INSTANCE_NOT_FOUND, or why the last one asked could not be reached.
    """
    instance = census.find(instance_id)
    holders = census.holders[instance_id]
    names = names_of_nodes(holders)
    asked = [cluster.head(instance.placement)]
    asked += [cluster.runner(n.node_id, names.label(n.node_id), n.endpoints) for n in holders]
    *first, last = dict.fromkeys(asked)
    for runner in first:
        try:
            return await runner.stop(instance_id)
        except ShardringError as error:
            if error.reason not in (Reason.SERVICE_UNAVAILABLE, Reason.SERVICE_TIMEOUT):
                raise
    return await last.stop(instance_id)


async def _place(cluster: Cluster, wanted: Wanted, request_id: str) -> placement_pb2.Placement:
    return await cluster.place(
        placement_service_pb2.PlaceRequest(
            model_id=wanted.model_id,
            revision=wanted.revision,
            constraints=wanted.constraints,
            request_id=request_id,
            objective=wanted.objective,
        )
    )


def _fulfils(placement: placement_pb2.Placement, wanted: Wanted) -> bool:
    layers = {rank.node_id: rank.layers.end - rank.layers.start for rank in placement.ranks}
    constraints = wanted.constraints
    cached = any(rank.cache_bytes for rank in placement.ranks)
    return (
        len(layers) >= constraints.min_node_count
        and layers.keys() >= set(constraints.required_node_ids)
        and layers.keys().isdisjoint(constraints.excluded_node_ids)
        and all(layers.get(n) == count for n, count in constraints.layer_counts.items())
        and all(layers.get(n, 0) <= most for n, most in constraints.max_layer_counts.items())
        # How much cache was set aside for how many tokens, a placement does not say.
        and (cached or not constraints.context_token_count)
    )


def _runs_so(options: runner_pb2.InstanceOptions, wanted: runner_pb2.InstanceOptions) -> bool:
    """Return whether an instance is run as is wanted; what isn't said may be anything."""
    return wanted.cache_bits in (0, options.cache_bits) and wanted.max_cache_token_count in (
        0,
        options.max_cache_token_count,
    )


def _why_over(instance: runner_pb2.Instance) -> ShardringError:
    if instance.HasField("error"):
        return error_from_proto(instance.error)
    return ShardringError(
        Reason.INSTANCE_NOT_READY,
        f"Instance {instance.instance_id} was stopped by someone else while it started.",
        metadata={"instance_id": instance.instance_id},
    )
