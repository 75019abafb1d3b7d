"""The decision, as data."""

from dataclasses import dataclass

from services.common.addresses import HostPort
from services.placement.domain.candidates import WHOLE, Candidates
from services.placement.domain.cluster import Backend
from services.placement.domain.hosts import host_lists, runner_endpoints
from services.placement.domain.model import Model
from services.placement.domain.rings import Ring
from services.placement.domain.search import Found
from services.placement.domain.shards import rank_order, stages_of


@dataclass(frozen=True)
class RankAssignment:
    """What one rank of a ring is given."""

    rank: int
    node_id: str
    node_name: str
    endpoints: tuple[HostPort, ...]
    # Layers [start, end).
    start: int
    end: int
    # The rank's own MLX host list, "address:port"; empty for a ring of one.
    hosts: tuple[str, ...]
    weight_bytes: int
    memory_available_bytes: int
    backend: Backend


@dataclass(frozen=True)
class Score:
    """The parts of the choice, in the order they count."""

    node_count: int
    has_leaf: bool
    # Sum of the fractions of the model on the ring's disks.
    download_score: float
    memory_available_bytes: int
    compared_count: int
    proven_optimal: bool


@dataclass(frozen=True)
class Placement:
    """Which nodes run a model, in which ring order, and what each holds."""

    model_id: str
    commit: str
    layer_count: int
    # In rank order.
    ranks: tuple[RankAssignment, ...]
    score: Score


def placement_of(
    candidates: Candidates, model: Model, ring: Ring, found: Found, request_id: str
) -> Placement:
    """Work out ranks, stages, host lists and ports for the ring that was found."""
    cluster, memory = candidates.cluster, candidates.memory_bytes
    ordered = rank_order(model, ring, memory)
    # The search accepts only rings for which there is an order.
    assert ordered is not None
    order, counts = ordered
    hosts = host_lists(cluster, order, request_id)
    ranks = tuple(
        RankAssignment(
            rank=rank,
            node_id=node_id,
            node_name=cluster.nodes[node_id].name,
            endpoints=tuple(runner_endpoints(cluster, node_id, order)),
            start=start,
            end=end,
            hosts=tuple(hosts[rank]),
            weight_bytes=model.stage_bytes(start, end),
            memory_available_bytes=memory[node_id],
            backend=cluster.nodes[node_id].backends[0],
        )
        for rank, (node_id, (start, end)) in enumerate(zip(order, stages_of(counts), strict=True))
    )
    score = Score(
        node_count=len(ring),
        has_leaf=not cluster.leaves.isdisjoint(ring),
        download_score=sum(candidates.download_scores[node_id] for node_id in ring) / WHOLE,
        memory_available_bytes=sum(memory[node_id] for node_id in ring),
        compared_count=found.compared_count,
        proven_optimal=found.proven,
    )
    return Placement(model.model_id, model.commit, model.layer_count, ranks, score)
