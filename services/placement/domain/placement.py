"""The decision, as data."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from services.common.addresses import HostPort
from services.placement.domain.candidates import WHOLE, Candidates
from services.placement.domain.cluster import UNMEASURED_NANOSECONDS, Backend, RingBackend
from services.placement.domain.hosts import host_lists, runner_endpoints
from services.placement.domain.jaccl import coordinator_addresses, device_matrix
from services.placement.domain.model import Model, Sharding
from services.placement.domain.request import PREDICTED_WAY
from services.placement.domain.rings import Ring
from services.placement.domain.runner_up import LostBy, RunnerUp
from services.placement.domain.search import Found
from services.placement.domain.shards import rank_order, stages_of
from services.placement.domain.speed import Pace, Prediction


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
    # Key-value cache set aside for the asked context.
    cache_bytes: int
    memory_available_bytes: int
    backend: Backend
    # JACCL: by rank, the RDMA device of this rank's node that reaches it, "" for itself; and where
    # rank 0 coordinates, as this rank dials it. Empty on the MLX ring and for a ring of one.
    rdma_devices: tuple[str, ...] = ()
    coordinator: str = ""


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
    slowest_hop: "Hop | None"
    runner_up: "Alternative | None"


@dataclass(frozen=True)
class Hop:
    """A message there and back between neighbours of a ring, in the slower direction."""

    source: str
    sink: str
    # None where nobody measured the link.
    nanoseconds: int | None


@dataclass(frozen=True)
class Alternative:
    """A ring of the same size that lost."""

    node_ids: tuple[str, ...]
    download_score: float
    memory_available_bytes: int
    lost_by: LostBy


@dataclass(frozen=True)
class Placement:
    """Which nodes run a model, in which ring order, and what each holds."""

    model_id: str
    commit: str
    layer_count: int
    # In rank order.
    ranks: tuple[RankAssignment, ...]
    score: Score
    sharding: Sharding
    ring_backend: RingBackend
    # None where it is not known.
    predicted: Prediction | None = None


def placement_of(
    candidates: Candidates,
    model: Model,
    found: Found,
    second: RunnerUp | None,
    request_id: str,
    counts: Sequence[int] | None = None,
) -> Placement:
    """Work out ranks, stages, host lists and ports for the ring that was found.

    With `counts` the ring is in rank order, and these are the layers of each rank.
    """
    assert found.ring is not None
    cluster, memory, ring = candidates.cluster, candidates.memory_bytes, found.ring
    # One node: pipeline on the ring backend, whatever was asked.
    sharding = model.sharding if len(ring) > 1 else Sharding.PIPELINE
    backend = candidates.ring_backend if len(ring) > 1 else RingBackend.MLX_RING
    order, parts = _parts(candidates, model, ring, sharding, counts)
    predicted = None
    if (sharding, backend) == PREDICTED_WAY:
        layers = [part.end - part.start for part in parts]
        predicted = Pace(cluster, model).predict(order, layers)
    is_jaccl = backend is RingBackend.JACCL
    hosts = [[]] * len(ring) if is_jaccl else host_lists(cluster, order, request_id)
    devices = device_matrix(cluster, order) if is_jaccl else [()] * len(ring)
    coordinators = (
        coordinator_addresses(cluster, order, request_id) if is_jaccl else [""] * len(ring)
    )
    ranks = tuple(
        RankAssignment(
            rank=rank,
            node_id=node_id,
            node_name=cluster.nodes[node_id].name,
            endpoints=tuple(runner_endpoints(cluster, node_id, order)),
            start=part.start,
            end=part.end,
            hosts=tuple(hosts[rank]),
            weight_bytes=part.weight_bytes,
            cache_bytes=part.cache_bytes,
            memory_available_bytes=memory[node_id],
            backend=cluster.nodes[node_id].backends_for(backend)[0],
            rdma_devices=tuple(devices[rank]),
            coordinator=coordinators[rank],
        )
        for rank, (node_id, part) in enumerate(zip(order, parts, strict=True))
    )
    score = Score(
        node_count=len(ring),
        has_leaf=not cluster.leaves.isdisjoint(ring),
        download_score=_download_score(candidates, ring),
        memory_available_bytes=sum(memory[node_id] for node_id in ring),
        compared_count=found.compared_count,
        proven_optimal=found.proven,
        slowest_hop=_slowest_hop(candidates, order),
        runner_up=None if second is None else _alternative(candidates, second),
    )
    return Placement(
        model.model_id,
        model.commit,
        model.layer_count,
        ranks,
        score,
        sharding,
        backend,
        predicted,
    )


@dataclass(frozen=True)
class _Part:
    """What one rank holds."""

    start: int
    end: int
    weight_bytes: int
    cache_bytes: int


def _parts(
    candidates: Candidates,
    model: Model,
    ring: Ring,
    sharding: Sharding,
    counts: Sequence[int] | None,
) -> tuple[tuple[str, ...], list[_Part]]:
    if sharding is Sharding.TENSOR:
        count, layers = len(ring), model.layer_count
        cache = -(-layers * model.cache_bytes_per_layer // count)
        weights = model.tensor_share_bytes(count) - cache
        return ring, [_Part(0, layers, weights, cache)] * count
    ordered = (ring, counts) if counts else rank_order(model, ring, candidates.rooms)
    # The search accepts only rings for which there is an order.
    assert ordered is not None
    order, counts = ordered
    return order, [
        _Part(
            start,
            end,
            model.stage_weight_bytes(start, end),
            (end - start) * model.cache_bytes_per_layer,
        )
        for start, end in stages_of(counts)
    ]


def _slowest_hop(candidates: Candidates, order: Ring) -> Hop | None:
    if len(order) == 1:
        return None
    pairs = pairwise((*order, order[0]))
    source, sink = max(pairs, key=lambda pair: candidates.graph.edges[pair]["hop"])
    nanoseconds = candidates.graph.edges[source, sink]["hop"]
    return Hop(source, sink, None if nanoseconds == UNMEASURED_NANOSECONDS else nanoseconds)


def _alternative(candidates: Candidates, second: RunnerUp) -> Alternative:
    return Alternative(
        node_ids=second.ring,
        download_score=_download_score(candidates, second.ring),
        memory_available_bytes=sum(candidates.memory_bytes[node] for node in second.ring),
        lost_by=second.lost_by,
    )


def _download_score(candidates: Candidates, ring: Ring) -> float:
    return sum(candidates.download_scores[node_id] for node_id in ring) / WHOLE
