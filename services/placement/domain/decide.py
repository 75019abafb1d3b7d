"""From what is known and asked to a placement, or for every ring size one or its refusal."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from services.common.errors import ShardringError
from services.placement.domain.budget import Budget
from services.placement.domain.by_speed import place_by_speed
from services.placement.domain.candidates import Download, candidates_of
from services.placement.domain.cluster import Cluster, RingBackend
from services.placement.domain.model import Model, Sharding, check_model
from services.placement.domain.placement import Placement, placement_of
from services.placement.domain.refusals import (
    Asked,
    below_minimum,
    check_cluster,
    check_layer_counts,
    count_refusal,
    cut_refusal,
    for_now,
    ring_refusal,
    size_refusal,
)
from services.placement.domain.request import Objective, PlacementRequest
from services.placement.domain.runner_up import runner_up
from services.placement.domain.search import (
    PREVIEW_STEPS,
    TOTAL_STEPS,
    RingSearch,
    sizes_to_try,
    smallest_ring,
)


def place(
    cluster: Cluster,
    model: Model,
    downloads: Mapping[str, Download],
    request: PlacementRequest,
    stopped: Callable[[], bool] = lambda: False,
) -> Placement:
    """Choose the ring. Raises ShardringError with the reasons when there is none.

    `downloads` by node id; a node without a record has nothing of the model. Raises
    budget.Stopped once `stopped` says True.
    """
    try:
        asked = _asked(cluster, model, downloads, request)
        budget = Budget(TOTAL_STEPS, stopped)
        least = max(request.min_node_count, len(request.required))
        refusal = count_refusal(asked, least)
        if refusal:
            raise refusal
        sizes = sizes_to_try(asked.candidates, asked.model, least)
        if request.objective is not Objective.DEFAULT:
            fastest = place_by_speed(asked, sizes, budget)
            if fastest is not None:
                return fastest
        found = smallest_ring(asked.candidates, asked.model, least, budget)
        if found.ring:
            other = runner_up(asked.candidates, asked.model, found.ring, budget)
            return placement_of(asked.candidates, asked.model, found, other, request.request_id)
        every = range(least, len(asked.candidates.node_ids) + 1)
        cut = cut_refusal(asked, every, budget.part(TOTAL_STEPS))
        raise cut or ring_refusal(asked, sizes, found.proven, budget.part(TOTAL_STEPS))
    except ShardringError as error:
        raise for_now(cluster, error) from None


@dataclass(frozen=True)
class Preview:
    """What `place` would give or raise for one way to cut the model, backend and ring size."""

    sharding: Sharding
    ring_backend: RingBackend
    node_count: int
    outcome: Placement | ShardringError


def preview(
    cluster: Cluster,
    model: Model,
    downloads: Mapping[str, Download],
    request: PlacementRequest,
    ways: Sequence[tuple[Sharding, RingBackend]],
    stopped: Callable[[], bool] = lambda: False,
) -> list[Preview]:
    """Return for each of some ways, and each ring size from 1 to the number of nodes, what `place`
    would give or raise; what comes to the same placement once.

    Raises what concerns no way and size in particular.
    """
    previews: list[Preview] = []
    budget = Budget(PREVIEW_STEPS, stopped)
    for sharding, ring_backend in ways:
        way = replace(request, sharding=sharding, ring_backend=ring_backend)
        try:
            asked = _asked(cluster, model, downloads, way)
        except ShardringError as error:
            raise for_now(cluster, error) from None
        search = RingSearch(asked.candidates, asked.model, max(2, len(cluster.nodes)))
        for size in range(1, len(cluster.nodes) + 1):
            outcome = _preview(asked, search, size, budget)
            if isinstance(outcome, ShardringError):
                outcome = for_now(cluster, outcome)
            elif any(outcome == known.outcome for known in previews):
                continue
            previews.append(Preview(sharding, ring_backend, size, outcome))
    return previews


def _preview(
    asked: Asked, search: RingSearch, size: int, budget: Budget
) -> Placement | ShardringError:
    refusal = (
        below_minimum(asked.request, size)
        or count_refusal(asked, size)
        or size_refusal(asked, size)
    )
    if refusal:
        return refusal
    if asked.request.objective is not Objective.DEFAULT:
        try:
            fastest = place_by_speed(asked, [size], budget, len(asked.candidates.node_ids))
        except ShardringError as error:
            return error
        if fastest is not None:
            return fastest
    found = search.of_size(size, budget)
    if found.ring:
        return placement_of(asked.candidates, asked.model, found, None, asked.request.request_id)
    cut = cut_refusal(asked, range(size, size + 1), budget)
    return cut or ring_refusal(asked, [size], found.proven, budget)


def _asked(
    cluster: Cluster,
    model: Model,
    downloads: Mapping[str, Download],
    request: PlacementRequest,
) -> Asked:
    check_cluster(cluster, request)
    check_model(model)
    check_layer_counts(model, request)
    cluster = replace(cluster, message_bytes=model.message_bytes or cluster.message_bytes)
    model = model.run_as(request.sharding, request.cache_token_count)
    return Asked(candidates_of(cluster, downloads, request), model, request)
