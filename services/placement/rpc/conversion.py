"""Between PlacementService's messages and the domain."""

from services.common.errors import ShardringError
from services.common.status import error_to_proto
from services.placement.domain.cluster import Backend
from services.placement.domain.placement import Placement, RankAssignment, Score
from services.placement.domain.request import PlacementRequest, request_of
from shardring.common.v1 import common_pb2
from shardring.placement.v1 import placement_pb2, placement_service_pb2

_BACKENDS = {
    Backend.METAL: common_pb2.BACKEND_METAL,
    Backend.CPU: common_pb2.BACKEND_CPU,
    Backend.CUDA: common_pb2.BACKEND_CUDA,
}


def request_from_proto(
    message: placement_service_pb2.PlaceRequest | placement_service_pb2.PreviewPlacementsRequest,
) -> PlacementRequest:
    """Return the checked request. Raises INVALID_FIELD. Previews have no request id."""
    return request_of(
        model_id=message.model_id,
        revision=message.revision,
        min_node_count=message.constraints.min_node_count,
        required=tuple(message.constraints.required_node_ids),
        excluded=tuple(message.constraints.excluded_node_ids),
        request_id=(
            message.request_id if isinstance(message, placement_service_pb2.PlaceRequest) else ""
        ),
    )


def placement_to_proto(placement: Placement) -> placement_pb2.Placement:
    """Return a placement as a message."""
    return placement_pb2.Placement(
        model_id=placement.model_id,
        commit=placement.commit,
        layer_count=placement.layer_count,
        ranks=[rank_to_proto(rank) for rank in placement.ranks],
        score=score_to_proto(placement.score),
    )


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
    )


def preview_to_proto(
    size: int, outcome: Placement | ShardringError
) -> placement_service_pb2.Preview:
    """Return what one ring size would get as a message."""
    if isinstance(outcome, ShardringError):
        return placement_service_pb2.Preview(node_count=size, refusal=error_to_proto(outcome))
    return placement_service_pb2.Preview(node_count=size, placement=placement_to_proto(outcome))
