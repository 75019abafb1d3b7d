"""Between the runner's plain data and the messages of mlx.grpc.engine.MlxEngine."""

from collections.abc import Sequence

from smg_grpc_proto import mlx_engine_pb2 as pb

from services.common.errors import invalid_field
from services.runner.adapters.model_files import ModelFacts
from services.runner.domain.request import GenerationRequest, Input, Sampling, Stop
from services.runner.requests import Completion, Part

_MAX_INT32 = 2**31 - 1


def generation_from_proto(request: pb.GenerateRequest, random_seed: int) -> GenerationRequest:
    """Read a request. What proto3 cannot tell from "not given" means off: a top_p or a repetition
    penalty of 0. No temperature is 1, as of the APIs that gateways speak.

    Raises ShardringError(INVALID_FIELD) for what has no place in a GenerationRequest.
    """
    params = request.sampling_params
    if params.HasField("max_tokens"):
        _check_range("sampling_params.max_tokens", params.max_tokens, 1, _MAX_INT32)
    for token_id in params.stop_token_ids:
        _check_range("sampling_params.stop_token_ids", token_id, 0, _MAX_INT32)
    return GenerationRequest(
        input=_input_from_proto(request),
        sampling=Sampling(
            temperature=params.temperature if params.HasField("temperature") else 1.0,
            top_p=params.top_p or 1.0,
            top_k=params.top_k,
            min_p=params.min_p,
            # Every 32 bits are a seed, those that read as a negative number too.
            seed=params.seed % 2**32 if params.HasField("seed") else random_seed,
            repeatable=params.HasField("seed"),
            repetition_penalty=params.repetition_penalty or 1.0,
            frequency_penalty=params.frequency_penalty,
            presence_penalty=params.presence_penalty,
            logit_bias=tuple(sorted(params.logit_bias.items())),
        ),
        stop=Stop(token_ids=tuple(params.stop_token_ids), ignore_end_tokens=params.ignore_eos),
        max_token_count=params.max_tokens,
        top_logprob_count=params.logprobs if params.HasField("logprobs") else None,
    )


def chunk_to_proto(
    part: Part, prompt_token_count: int, completion_token_count: int
) -> pb.GenerateResponse:
    """Write tokens that came; the counts are those of the answer so far."""
    return pb.GenerateResponse(
        chunk=pb.GenerateStreamChunk(
            token_ids=part.token_ids,
            prompt_tokens=prompt_token_count,
            completion_tokens=completion_token_count,
            output_logprobs=logprobs_to_proto([part]),
            index=part.choice_index,
        )
    )


def complete_to_proto(completion: Completion, held: Sequence[Part]) -> pb.GenerateResponse:
    """Write the end of an answer. `held`: its parts, where they have not been sent."""
    return pb.GenerateResponse(
        complete=pb.GenerateComplete(
            output_ids=[token_id for part in held for token_id in part.token_ids],
            finish_reason=completion.finish_reason,
            prompt_tokens=completion.prompt_token_count,
            completion_tokens=completion.completion_token_count,
            cached_tokens=completion.cached_token_count,
            output_logprobs=logprobs_to_proto(held),
            index=completion.choice_index,
            matched_stop_token_id=completion.stop_token_id,
        )
    )


def logprobs_to_proto(parts: Sequence[Part]) -> pb.OutputLogProbs | None:
    """Write the log-probabilities of all tokens of some parts; None where none were asked for."""
    told = [logprob for part in parts for logprob in part.logprobs or ()]
    if not told:
        return None
    return pb.OutputLogProbs(
        token_logprobs=[one.chosen.logprob for one in told],
        token_ids=[one.chosen.token_id for one in told],
        top_logprobs=[
            pb.TopLogProbs(
                values=[other.logprob for other in one.top],
                token_ids=[other.token_id for other in one.top],
            )
            for one in told
        ],
    )


def model_info_to_proto(model_id: str, facts: ModelFacts) -> pb.GetModelInfoResponse:
    """Write what is known of a model."""
    context = facts.context_token_count
    return pb.GetModelInfoResponse(
        model_path=model_id,
        served_model_name=model_id,
        is_generation=True,
        model_type=facts.model_type,
        architectures=facts.architectures,
        max_context_length=context,
        # The answer's first token needs room too.
        max_req_input_len=max(0, context - 1),
        vocab_size=facts.vocabulary_size,
        eos_token_ids=facts.end_token_ids,
        bos_token_id=facts.start_token_id,
        pad_token_id=facts.padding_token_id,
    )


def _input_from_proto(request: pb.GenerateRequest) -> Input:
    match request.WhichOneof("input"):
        case "tokenized":
            return Input(token_ids=tuple(request.tokenized.input_ids))
        case "text":
            return Input(prompt=request.text)
        case _:
            return Input()


def _check_range(field: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise invalid_field(field, value, f"{low} to {high}")
