"""Between the runner's plain data and its messages."""

from services.common.addresses import HostPort
from services.common.status import error_from_proto, error_to_proto
from services.common.times import duration_of, seconds, timestamp_of
from services.runner.domain.request import (
    ChosenLogprob,
    GenerationRequest,
    Input,
    Message,
    Sampling,
    Stop,
    TokenLogprob,
)
from services.runner.domain.ring import InstanceOptions, Rank, Ring
from services.runner.domain.state import ShardState
from services.runner.requests import Completion, Part
from services.runner.views import InstanceLoad, InstanceView, ShardUsage, ShardView
from shardring.common.v1 import common_pb2
from shardring.placement.v1 import placement_pb2
from shardring.runner.v1 import instance_service_pb2, runner_pb2

_FINISH_REASONS = {
    "stop": runner_pb2.FINISH_REASON_STOP,
    "length": runner_pb2.FINISH_REASON_LENGTH,
}


def ring_from_proto(
    placement: placement_pb2.Placement, options: runner_pb2.InstanceOptions
) -> Ring:
    """Read a placement and how to run it; `check_ring` says whether it makes sense."""
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
        options=InstanceOptions(options.cache_bits, options.max_cache_token_count),
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
        usage=_usage_to_proto(view.usage) if view.usage else None,
        log_lines=view.log_lines,
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
        usage=_usage_from_proto(shard.usage) if shard.HasField("usage") else None,
        log_lines=tuple(shard.log_lines),
    )


def _usage_to_proto(usage: ShardUsage) -> runner_pb2.ShardUsage:
    return runner_pb2.ShardUsage(
        busy_fraction=usage.busy_fraction,
        cache_bytes=usage.cache_bytes,
        cache_limit_bytes=usage.cache_limit_bytes,
        prefix_cache_bytes=usage.prefix_cache_bytes,
    )


def _usage_from_proto(usage: runner_pb2.ShardUsage) -> ShardUsage:
    return ShardUsage(
        busy_fraction=usage.busy_fraction,
        cache_bytes=usage.cache_bytes,
        cache_limit_bytes=usage.cache_limit_bytes,
        prefix_cache_bytes=usage.prefix_cache_bytes,
    )


def load_to_proto(load: InstanceLoad) -> runner_pb2.InstanceLoad:
    """Write what an instance is doing."""
    return runner_pb2.InstanceLoad(
        running_count=load.running_count,
        queued_count=load.queued_count,
        prompt_tokens_per_second=load.prompt_tokens_per_second,
        completion_tokens_per_second=load.completion_tokens_per_second,
        batch_occupancy=load.batch_occupancy,
    )


def options_to_proto(options: InstanceOptions) -> runner_pb2.InstanceOptions:
    """Write how an instance is run."""
    return runner_pb2.InstanceOptions(
        cache_bits=options.cache_bits, max_cache_token_count=options.max_cache_tokens
    )


def instance_to_proto(view: InstanceView) -> runner_pb2.Instance:
    """Write an instance."""
    return runner_pb2.Instance(
        instance_id=view.instance_id,
        placement=ring_to_proto(view.ring),
        options=options_to_proto(view.ring.options),
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
        load=load_to_proto(view.load) if view.load else None,
        mlx_engine_port=view.mlx_engine_port,
    )


def generation_from_proto(
    request: instance_service_pb2.GenerateRequest, random_seed: int
) -> GenerationRequest:
    """Read a request; `check_request` says whether it makes sense. `random_seed` stands in where
    none is given."""
    counted = request.HasField("top_logprob_count")
    return GenerationRequest(
        input=input_from_proto(request.input),
        sampling=sampling_from_proto(request.sampling, random_seed),
        stop=stop_from_proto(request.stop),
        max_token_count=request.max_token_count,
        top_logprob_count=request.top_logprob_count if counted else None,
        choice_count=request.choice_count or 1,
    )


def sampling_from_proto(sampling: runner_pb2.Sampling, random_seed: int) -> Sampling:
    """Read sampling settings; `random_seed` stands in where none is given."""
    penalty = sampling.repetition_penalty if sampling.HasField("repetition_penalty") else 1.0
    return Sampling(
        temperature=sampling.temperature,
        top_p=sampling.top_p if sampling.HasField("top_p") else 1.0,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed if sampling.HasField("seed") else random_seed,
        repeatable=sampling.HasField("seed"),
        repetition_penalty=penalty,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        # A map has no order on the wire: sorted, so that equal requests are equal.
        logit_bias=tuple(sorted(sampling.logit_bias.items())),
    )


def stop_from_proto(stop: runner_pb2.StopConditions) -> Stop:
    """Read what ends a generation."""
    return Stop(
        texts=tuple(stop.texts),
        token_ids=tuple(stop.token_ids),
        ignore_end_tokens=stop.ignore_end_tokens,
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


def part_to_proto(part: Part | Completion) -> instance_service_pb2.GenerateResponse:
    """Write one message of an answer: tokens that came, or a choice's last text and its figures."""
    if isinstance(part, Part):
        return instance_service_pb2.GenerateResponse(
            text=part.text,
            token_ids=part.token_ids,
            choice_index=part.choice_index,
            logprobs=[logprob_to_proto(one) for one in part.logprobs or ()],
        )
    return instance_service_pb2.GenerateResponse(
        text=part.text, completion=completion_to_proto(part), choice_index=part.choice_index
    )


def logprob_to_proto(logprob: ChosenLogprob) -> runner_pb2.ChosenLogprob:
    """Write a generated token's log-probability and the likeliest ones'."""
    return runner_pb2.ChosenLogprob(
        chosen=_token_logprob_to_proto(logprob.chosen),
        top=[_token_logprob_to_proto(one) for one in logprob.top],
    )


def _token_logprob_to_proto(one: TokenLogprob) -> runner_pb2.TokenLogprob:
    return runner_pb2.TokenLogprob(token_id=one.token_id, text=one.text, logprob=one.logprob)


def completion_to_proto(completion: Completion) -> runner_pb2.Completion:
    """Write the figures of a finished generation."""
    written = runner_pb2.Completion(
        finish_reason=_FINISH_REASONS[completion.finish_reason],
        prompt_token_count=completion.prompt_token_count,
        completion_token_count=completion.completion_token_count,
        cached_token_count=completion.cached_token_count,
        queue_duration=duration_of(completion.queue_seconds),
        prompt_duration=duration_of(completion.prompt_seconds),
        decode_duration=duration_of(completion.decode_seconds),
    )
    if completion.stop_text is not None:
        written.stop_text = completion.stop_text
    elif completion.stop_token_id is not None:
        written.stop_token_id = completion.stop_token_id
    return written
