"""Between PlacementService's messages and the domain."""

from itertools import product

from services.common.errors import ShardringError, invalid_field
from services.common.status import error_to_proto
from services.placement.domain.cluster import Backend, RingBackend
from services.placement.domain.decide import Preview
from services.placement.domain.model import Sharding
from services.placement.domain.placement import (
    Alternative,
    Hop,
    Placement,
    RankAssignment,
    Score,
)
from services.placement.domain.request import (
    PREDICTED_WAY,
    Objective,
    PlacementRequest,
    request_of,
)
from services.placement.domain.speed import Part, Prediction
from shardring.common.v1 import common_pb2
from shardring.placement.v1 import placement_pb2, placement_service_pb2

_BACKENDS = {
    Backend.METAL: common_pb2.BACKEND_METAL,
    Backend.CPU: common_pb2.BACKEND_CPU,
    Backend.CUDA: common_pb2.BACKEND_CUDA,
}
_SHARDINGS = {
    Sharding.PIPELINE: common_pb2.SHARDING_PIPELINE,
    Sharding.TENSOR: common_pb2.SHARDING_TENSOR,
}
_RING_BACKENDS = {
    RingBackend.MLX_RING: common_pb2.RING_BACKEND_MLX_RING,
    RingBackend.JACCL: common_pb2.RING_BACKEND_JACCL,
}

_OBJECTIVES = {
    placement_pb2.OBJECTIVE_UNSPECIFIED: Objective.DEFAULT,
    placement_pb2.OBJECTIVE_DECODE_LATENCY: Objective.DECODE_LATENCY,
    placement_pb2.OBJECTIVE_THROUGHPUT: Objective.THROUGHPUT,
}


def request_from_proto(
    message: placement_service_pb2.PlaceRequest | placement_service_pb2.PreviewPlacementsRequest,
) -> PlacementRequest:
    """Return the checked request. Raises INVALID_FIELD. Previews have no request id."""
    constraints = message.constraints
    return request_of(
        model_id=message.model_id,
        revision=message.revision,
        min_node_count=constraints.min_node_count,
        required=tuple(constraints.required_node_ids),
        excluded=tuple(constraints.excluded_node_ids),
        request_id=(
            message.request_id if isinstance(message, placement_service_pb2.PlaceRequest) else ""
        ),
        sharding=_sharding_from_proto(message.sharding) or Sharding.PIPELINE,
        ring_backend=_ring_backend_from_proto(message.ring_backend) or RingBackend.MLX_RING,
        context_token_count=constraints.context_token_count,
        concurrent_request_count=constraints.concurrent_request_count,
        headroom_bytes=constraints.headroom_bytes,
        max_layer_counts=constraints.max_layer_counts,
        layer_counts=constraints.layer_counts,
        objective=_objective_from_proto(message.objective),
    )


def ways_from_proto(
    message: placement_service_pb2.PreviewPlacementsRequest,
) -> list[tuple[Sharding, RingBackend]]:
    """Return the ways to preview: those asked for, or all. Raises INVALID_FIELD."""
    sharding = _sharding_from_proto(message.sharding)
    ring_backend = _ring_backend_from_proto(message.ring_backend)
    if _objective_from_proto(message.objective) is not Objective.DEFAULT:
        # Others were refused with the request.
        return [PREDICTED_WAY]
    return list(
        product(
            list(Sharding) if sharding is None else [sharding],
            list(RingBackend) if ring_backend is None else [ring_backend],
        )
    )


def _sharding_from_proto(number: int) -> Sharding | None:
    if number == common_pb2.SHARDING_UNSPECIFIED:
        return None
    for sharding, known in _SHARDINGS.items():
        if known == number:
            return sharding
    raise invalid_field("sharding", number, "PIPELINE or TENSOR")


def _ring_backend_from_proto(number: int) -> RingBackend | None:
    if number == common_pb2.RING_BACKEND_UNSPECIFIED:
        return None
    for ring_backend, known in _RING_BACKENDS.items():
        if known == number:
            return ring_backend
    raise invalid_field("ring_backend", number, "MLX_RING or JACCL")


def _objective_from_proto(number: int) -> Objective:
    for known, objective in _OBJECTIVES.items():
        if known == number:
            return objective
    raise invalid_field("objective", number, "DECODE_LATENCY or THROUGHPUT, or none")


def placement_to_proto(placement: Placement) -> placement_pb2.Placement:
    """Return a placement as a message."""
    return placement_pb2.Placement(
        model_id=placement.model_id,
        commit=placement.commit,
        layer_count=placement.layer_count,
        ranks=[rank_to_proto(rank) for rank in placement.ranks],
        score=score_to_proto(placement.score),
        sharding=_SHARDINGS[placement.sharding],
        ring_backend=_RING_BACKENDS[placement.ring_backend],
        predicted_speed=(
            None if placement.predicted is None else prediction_to_proto(placement.predicted)
        ),
    )


def prediction_to_proto(predicted: Prediction) -> placement_pb2.PredictedSpeed:
    """Return predicted figures as a message."""
    message = placement_pb2.PredictedSpeed(
        tokens_per_second=predicted.tokens_per_second,
        throughput_tokens_per_second=predicted.throughput_tokens_per_second,
        slowest=part_to_proto(predicted.slowest),
        prefill_tokens_per_second=predicted.prefill_tokens_per_second,
    )
    message.decode_latency.FromNanoseconds(predicted.decode_nanoseconds)
    return message


def part_to_proto(part: Part) -> placement_pb2.PredictedPart:
    """Return a stage or hop as a message."""
    message = placement_pb2.PredictedPart()
    if part.is_hop:
        message.hop_rank = part.rank
    else:
        message.stage_rank = part.rank
    message.time.FromNanoseconds(part.nanoseconds)
    return message


def rank_to_proto(rank: RankAssignment) -> placement_pb2.RankAssignment:
    """Return one rank's part as a message."""
    return placement_pb2.RankAssignment(
        rank=rank.rank,
        node_id=rank.node_id,
        node_name=rank.node_name,
        endpoints=[
            common_pb2.Endpoint(address=endpoint.host, port=endpoint.port)
            for endpoint in rank.endpoints
        ],
        layers=common_pb2.LayerRange(start=rank.start, end=rank.end),
        hosts=rank.hosts,
        weight_bytes=rank.weight_bytes,
        memory_available_bytes=rank.memory_available_bytes,
        backend=_BACKENDS[rank.backend],
        cache_bytes=rank.cache_bytes,
        rdma_devices=rank.rdma_devices,
        coordinator=rank.coordinator,
    )


def score_to_proto(score: Score) -> placement_pb2.PlacementScore:
    """Return the reasons for the choice as a message."""
    return placement_pb2.PlacementScore(
        node_count=score.node_count,
        has_leaf=score.has_leaf,
        download_score=score.download_score,
        memory_available_bytes=score.memory_available_bytes,
        candidate_count=score.compared_count,
        proven_optimal=score.proven_optimal,
        slowest_hop=None if score.slowest_hop is None else hop_to_proto(score.slowest_hop),
        runner_up=None if score.runner_up is None else runner_up_to_proto(score.runner_up),
    )


def hop_to_proto(hop: Hop) -> placement_pb2.Hop:
    """Return a hop as a message."""
    message = placement_pb2.Hop(source_node_id=hop.source, sink_node_id=hop.sink)
    if hop.nanoseconds is not None:
        message.round_trip.FromNanoseconds(hop.nanoseconds)
    return message


def runner_up_to_proto(second: Alternative) -> placement_pb2.RunnerUp:
    """Return the ring that lost as a message."""
    return placement_pb2.RunnerUp(
        node_ids=second.node_ids,
        download_score=second.download_score,
        memory_available_bytes=second.memory_available_bytes,
        lost_by=placement_pb2.Rule.Value(f"RULE_{second.lost_by}"),
    )


def preview_to_proto(preview: Preview) -> placement_service_pb2.Preview:
    """Return what one way and ring size would get as a message."""
    message = placement_service_pb2.Preview(
        sharding=_SHARDINGS[preview.sharding],
        ring_backend=_RING_BACKENDS[preview.ring_backend],
        node_count=preview.node_count,
    )
    if isinstance(preview.outcome, ShardringError):
        message.refusal.CopyFrom(error_to_proto(preview.outcome))
    else:
        message.placement.CopyFrom(placement_to_proto(preview.outcome))
    return message
