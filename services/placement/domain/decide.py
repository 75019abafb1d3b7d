"""From what is known and asked to a placement, or for every ring size one or its refusal."""

from collections.abc import Callable, Mapping

from services.common.errors import ShardringError
from services.placement.domain.budget import Budget
from services.placement.domain.candidates import Download, candidates_of
from services.placement.domain.cluster import Cluster
from services.placement.domain.model import Model, check_model
from services.placement.domain.placement import Placement, placement_of
from services.placement.domain.refusals import (
    Asked,
    below_minimum,
    check_cluster,
    count_refusal,
    ring_refusal,
    while_gathering,
)
from services.placement.domain.request import PlacementRequest
from services.placement.domain.search import (
    TOTAL_STEPS,
    ring_of_size,
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
        found = smallest_ring(asked.candidates, model, least, budget)
        if found.ring:
            return placement_of(asked.candidates, model, found.ring, found, request.request_id)
        sizes = sizes_to_try(asked.candidates, model, least)
        raise ring_refusal(asked, sizes, found.proven, budget.part(TOTAL_STEPS))
    except ShardringError as error:
        raise while_gathering(cluster, error) from None


def preview(
    cluster: Cluster,
    model: Model,
    downloads: Mapping[str, Download],
    request: PlacementRequest,
    stopped: Callable[[], bool] = lambda: False,
) -> list[tuple[int, Placement | ShardringError]]:
    """Return for each ring size from 1 to the number of nodes what `place` would give or raise.

    Raises what concerns no size in particular.
    """
    try:
        asked = _asked(cluster, model, downloads, request)
    except ShardringError as error:
        raise while_gathering(cluster, error) from None
    budget = Budget(TOTAL_STEPS, stopped)
    previews: list[tuple[int, Placement | ShardringError]] = []
    for size in range(1, len(cluster.nodes) + 1):
        outcome = _preview(asked, size, budget)
        if isinstance(outcome, ShardringError):
            outcome = while_gathering(cluster, outcome)
        previews.append((size, outcome))
    return previews


def _preview(asked: Asked, size: int, budget: Budget) -> Placement | ShardringError:
    refusal = below_minimum(asked.request, size) or count_refusal(asked, size)
    if refusal:
        return refusal
    found = ring_of_size(asked.candidates, asked.model, size, budget)
    if found.ring:
        return placement_of(
            asked.candidates, asked.model, found.ring, found, asked.request.request_id
        )
    return ring_refusal(asked, [size], found.proven, budget)


def _asked(
    cluster: Cluster,
    model: Model,
    downloads: Mapping[str, Download],
    request: PlacementRequest,
) -> Asked:
    check_cluster(cluster, request)
    check_model(model)
    return Asked(candidates_of(cluster, downloads, request), model, request)
