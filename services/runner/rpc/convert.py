"""Between the runner's plain data and its messages."""

from services.common.addresses import HostPort
from services.common.status import error_from_proto, error_to_proto
from services.common.times import duration_of, seconds, timestamp_of
from services.runner.domain.request import Input, Message, Sampling
from services.runner.domain.ring import Rank, Ring
from services.runner.domain.state import ShardState
from services.runner.requests import Completion
from services.runner.views import InstanceView, ShardView
from shardring.common.v1 import common_pb2
from shardring.placement.v1 import placement_pb2
from shardring.runner.v1 import runner_pb2

_FINISH_REASONS = {
    "stop": runner_pb2.FINISH_REASON_STOP,
    "length": runner_pb2.FINISH_REASON_LENGTH,
}


def ring_from_proto(placement: placement_pb2.Placement) -> Ring:
    """Read a placement; `check_ring` says whether it makes sense."""
    return Ring(
        model_id=placement.model_id,
        commit=placement.commit,
        layer_count=placement.layer_count,
        ranks=tuple(
            Rank(
                rank=rank.rank,
                node_id=rank.node_id,
                node_name=rank.node_name or rank.node_id,
                endpoints=tuple(HostPort(e.address, e.port) for e in rank.endpoints),
                layers=(rank.layers.start, rank.layers.end),
                hosts=tuple(rank.hosts),
                weight_bytes=rank.weight_bytes,
                cache_bytes=rank.cache_bytes,
            )
            for rank in placement.ranks
        ),
        document=placement.SerializeToString(deterministic=True),
        is_tensor=placement.sharding == common_pb2.SHARDING_TENSOR,
        is_mlx_ring=placement.ring_backend != common_pb2.RING_BACKEND_JACCL,
    )


def ring_to_proto(ring: Ring) -> placement_pb2.Placement:
    """Return the placement that a ring was read from, fields this program doesn't know included."""
    return placement_pb2.Placement.FromString(ring.document)


def shard_to_proto(instance_id: str, rank: Rank, view: ShardView) -> runner_pb2.Shard:
    """Write a shard."""
    return runner_pb2.Shard(
        instance_id=instance_id,
        rank=view.rank,
        node_id=rank.node_id,
        layers=common_pb2.LayerRange(start=rank.layers[0], end=rank.layers[1]),
        state=runner_pb2.ShardState.ValueType(view.state),
        state_time=timestamp_of(view.state_time),
        error=error_to_proto(view.error) if view.error else None,
        memory_bytes=view.memory_bytes,
        download_fraction=view.download_fraction,
    )


def shard_from_proto(shard: runner_pb2.Shard) -> ShardView:
    """Read a shard."""
    return ShardView(
        rank=shard.rank,
        state=ShardState(shard.state),
        state_time=seconds(shard.state_time),
        error=error_from_proto(shard.error) if shard.HasField("error") else None,
        memory_bytes=shard.memory_bytes,
        download_fraction=shard.download_fraction,
    )


def instance_to_proto(view: InstanceView) -> runner_pb2.Instance:
    """Write an instance."""
    return runner_pb2.Instance(
        instance_id=view.instance_id,
        placement=ring_to_proto(view.ring),
        state=runner_pb2.InstanceState.ValueType(view.state),
        shards=[
            shard_to_proto(view.instance_id, rank, shard)
            for rank, shard in zip(view.ring.ranks, view.shards, strict=True)
        ],
        error=error_to_proto(view.error) if view.error else None,
        create_time=timestamp_of(view.create_time),
        rank=view.rank,
        request_count=view.request_count,
        has_chat_template=view.has_chat_template,
    )


def sampling_from_proto(sampling: runner_pb2.Sampling, random_seed: int) -> Sampling:
    """Read sampling settings; `random_seed` stands in where none is given."""
    return Sampling(
        temperature=sampling.temperature,
        top_p=sampling.top_p if sampling.HasField("top_p") else 1.0,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed if sampling.HasField("seed") else random_seed,
    )


def sampling_to_proto(sampling: Sampling) -> runner_pb2.Sampling:
    """Write sampling settings."""
    return runner_pb2.Sampling(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed,
    )


def input_from_proto(given: runner_pb2.GenerationInput) -> Input:
    """Read what to continue."""
    match given.WhichOneof("input"):
        case "prompt":
            return Input(prompt=given.prompt)
        case "messages":
            turns = given.messages.messages
            return Input(messages=tuple(Message(turn.role, turn.content) for turn in turns))
        case "token_ids":
            return Input(token_ids=tuple(given.token_ids.ids))
        case _:
            return Input()


def completion_to_proto(completion: Completion) -> runner_pb2.Completion:
    """Write the figures of a finished generation."""
    return runner_pb2.Completion(
        finish_reason=_FINISH_REASONS[completion.finish_reason],
        prompt_token_count=completion.prompt_token_count,
        completion_token_count=completion.completion_token_count,
        queue_duration=duration_of(completion.queue_seconds),
        prompt_duration=duration_of(completion.prompt_seconds),
        decode_duration=duration_of(completion.decode_seconds),
    )
