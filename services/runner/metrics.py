"""The runner's metrics: every instrument, with its unit and description.

Names are those of the OpenTelemetry semantic conventions for generative AI where these have one,
and `shardring.*` otherwise. Nothing is recorded unless the process exports metrics
(`services.common.metrics`).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Observation

from services.runner.views import InstanceLoad, InstanceView, ShardView

_SCOPE = "shardring.runner"
# As the conventions ask for.
_DURATIONS = (
    *(0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64),
    *(1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92),
)
_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08),
    *(0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)
_PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_TOKENS = tuple(float(4**power) for power in range(14))

Attributes = dict[str, str]
_Callback = Callable[[CallbackOptions], Iterable[Observation]]


class _Instruments:
    """What requests are recorded with."""

    def __init__(self) -> None:
        meter = metrics.get_meter(_SCOPE)
        self.duration = meter.create_histogram(
            "gen_ai.server.request.duration",
            "s",
            "From a request's arrival to its last token, or to its failure.",
            explicit_bucket_boundaries_advisory=_DURATIONS,
        )
        self.time_to_first_token = meter.create_histogram(
            "gen_ai.server.time_to_first_token",
            "s",
            "From a request's arrival to its first token, its wait in the queue included.",
            explicit_bucket_boundaries_advisory=_FIRST_TOKEN,
        )
        self.time_per_output_token = meter.create_histogram(
            "gen_ai.server.time_per_output_token",
            "s",
            "Time of each token after the first, averaged over the request.",
            explicit_bucket_boundaries_advisory=_PER_TOKEN,
        )
        self.token_usage = meter.create_histogram(
            "gen_ai.client.token.usage",
            "{token}",
            "Tokens of a request, by gen_ai.token.type.",
            explicit_bucket_boundaries_advisory=_TOKENS,
        )
        self.queue_time = meter.create_histogram(
            "shardring.request.queue_time",
            "s",
            "How long a request waited for room.",
            explicit_bucket_boundaries_advisory=_FIRST_TOKEN,
        )
        self.prefix_cache_hits = meter.create_counter(
            "shardring.prefix_cache.hits",
            "{token}",
            "Prompt tokens that needed no computing because their cache was kept.",
        )


# Made once: an instrument of one name that is made anew would be another.
_instruments = cache(_Instruments)


class Metrics:
    """What is told of one instance's requests."""

    def __init__(self, model_id: str, instance_id: str) -> None:
        self._attributes = {
            "gen_ai.provider.name": "shardring",
            "gen_ai.request.model": model_id,
            "shardring.instance.id": instance_id,
        }

    def request_ended(
        self,
        *,
        finish_reason: str | None = None,
        error_type: str | None = None,
        is_chat: bool = False,
        prompt_tokens: int = 0,
        cached_tokens: int = 0,
        completion_tokens: int = 0,
        queue_s: float | None = None,
        time_to_first_token_s: float | None = None,
        decode_s: float = 0.0,
        duration_s: float | None = None,
    ) -> None:
        """Record a request, or one of its choices, that has ended one way or the other.

        `finish_reason`: "stop", "length" or "cancelled"; `error_type`: a Reason's name, where it
        failed. `time_to_first_token_s` is from the arrival on, with `queue_s` in it; None: there
        came no token. `decode_s` is from the first token to the end; `duration_s` from the arrival
        to the end, where it is not the sum of these.
        """
        instruments = _instruments()
        attributes = self._attributes | {
            "gen_ai.operation.name": "chat" if is_chat else "text_completion"
        }
        outcome: Attributes = {}
        if error_type is not None:
            outcome["error.type"] = error_type
        if finish_reason is not None:
            outcome["shardring.finish_reason"] = finish_reason
        if duration_s is None:
            duration_s = (time_to_first_token_s or queue_s or 0.0) + decode_s
        instruments.duration.record(duration_s, attributes | outcome)
        if queue_s is not None:
            instruments.queue_time.record(queue_s, attributes)
        for kind, count in (("input", prompt_tokens), ("output", completion_tokens)):
            if count:
                instruments.token_usage.record(count, attributes | {"gen_ai.token.type": kind})
        if cached_tokens:
            instruments.prefix_cache_hits.add(cached_tokens, attributes)
        # The conventions have these two of successful answers only.
        if error_type is None and time_to_first_token_s is not None:
            instruments.time_to_first_token.record(time_to_first_token_s, attributes)
            if completion_tokens > 1:
                instruments.time_per_output_token.record(
                    decode_s / (completion_tokens - 1), attributes
                )


def observe_instances(instances: Callable[[], Sequence[InstanceView]]) -> None:
    """Have each export tell of these instances and of this node's shards of them.

    Call once a process, after `start_metrics`. `instances` is called from another thread.
    """
    meter = metrics.get_meter(_SCOPE)
    for name, unit, description, of_load in _OF_HEADS:
        meter.create_observable_gauge(name, [_heads(instances, of_load)], unit, description)
    for name, unit, description, of_shard in _OF_SHARDS:
        meter.create_observable_gauge(name, [_shards(instances, of_shard)], unit, description)


_OF_HEADS: tuple[tuple[str, str, str, Callable[[InstanceLoad], float]], ...] = (
    (
        "shardring.request.running",
        "{sequence}",
        "Sequences being computed. From the head.",
        lambda load: load.running_count,
    ),
    (
        "shardring.request.queued",
        "{sequence}",
        "Sequences waiting for room. From the head.",
        lambda load: load.queued_count,
    ),
    (
        "shardring.batch.occupancy",
        "{token}",
        "Tokens computed by one decode step, on average over the last seconds. From the head.",
        lambda load: load.batch_occupancy,
    ),
)
_OF_SHARDS: tuple[tuple[str, str, str, Callable[[ShardView], float | None]], ...] = (
    (
        "shardring.stage.utilization",
        "1",
        "Share of the last seconds in which a rank's stage computed.",
        lambda shard: shard.usage.busy_fraction if shard.usage else None,
    ),
    (
        "shardring.kv_cache.usage",
        "By",
        "Bytes of key-value caches that sequences were given.",
        lambda shard: shard.usage.cache_bytes if shard.usage else None,
    ),
    (
        "shardring.kv_cache.limit",
        "By",
        "The most bytes that key-value caches may take.",
        lambda shard: shard.usage.cache_limit_bytes if shard.usage else None,
    ),
    (
        "shardring.prefix_cache.usage",
        "By",
        "Bytes of key-value caches kept for prompts that begin alike.",
        lambda shard: shard.usage.prefix_cache_bytes if shard.usage else None,
    ),
    (
        "shardring.memory.usage",
        "By",
        "Bytes that MLX holds for a shard.",
        lambda shard: shard.memory_bytes or None,
    ),
)


def _heads(
    instances: Callable[[], Sequence[InstanceView]], read: Callable[[InstanceLoad], float]
) -> _Callback:
    def observe(_: CallbackOptions) -> Iterator[Observation]:
        for view in instances():
            if view.load is not None:
                yield Observation(read(view.load), _instance_attributes(view))

    return observe


def _shards(
    instances: Callable[[], Sequence[InstanceView]], read: Callable[[ShardView], float | None]
) -> _Callback:
    def observe(_: CallbackOptions) -> Iterator[Observation]:
        for view in instances():
            value = read(view.shards[view.rank])
            if value is not None:
                attributes = _instance_attributes(view) | {"shardring.rank": str(view.rank)}
                yield Observation(value, attributes)

    return observe


def _instance_attributes(view: InstanceView) -> Attributes:
    return {"gen_ai.request.model": view.ring.model_id, "shardring.instance.id": view.instance_id}
