"""What instances do and what their ranks spend, from one moment."""

from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from services.cli.names import names_of_ranks
from services.cli.render.instances import (
    instance_fault,
    instance_figures,
    instance_title,
    shard_state,
)
from services.cli.render.tables import add_row, bar, dim, new_table, state_text
from services.cli.text import count, percent, rate, size, stage
from shardring.runner.v1 import runner_pb2

# From this width on there is room for what is less often looked at.
_WIDE = 100
_BAR_WIDTH = 12


def top_picture(
    instances: Sequence[runner_pb2.Instance],
    *,
    now: float,
    width: int,
    remarks: Mapping[str, str] | None = None,
) -> RenderableType:
    """Return a summary, then for each instance its figures and a row for each rank.

    `now`: seconds since the epoch. `width`: columns of the terminal. `remarks`: instance id ->
    what is to be said of it, such as that its head does not answer.
    """
    parts: list[RenderableType] = [_summary(instances)]
    for instance in instances:
        parts += ["", instance_title(instance, now)]
        if figures := instance_figures(instance):
            parts.append(Text(figures))
        if remarks and instance.instance_id in remarks:
            parts.append(Text(remarks[instance.instance_id], style="yellow"))
        if fault := instance_fault(instance):
            parts.append(fault)
        parts.append(Padding(_ranks(instance, wide=width >= _WIDE), (0, 0, 0, 2), expand=False))
    return Group(*parts)


def _summary(instances: Sequence[runner_pb2.Instance]) -> Text:
    loads = [instance.load for instance in instances]
    tokens = sum(load.completion_tokens_per_second for load in loads)
    parts = [
        count(len(instances), "instance"),
        f"{rate(tokens)} tokens/s",
        f"{sum(load.running_count for load in loads)} running",
        f"{sum(load.queued_count for load in loads)} queued",
    ]
    return Text(", ".join(parts), style="bold")


def _ranks(instance: runner_pb2.Instance, *, wide: bool) -> RenderableType:
    names = names_of_ranks(instance.placement)
    headers = ["RANK", "NODE", *(["LAYERS"] if wide else []), "STATE", "STAGE USE", ">", ">MEMORY"]
    headers += [">CACHE", *([">PREFIXES"] if wide else [])]
    table = new_table(*headers)
    for shard in instance.shards:
        told = shard.HasField("usage")
        usage = shard.usage
        add_row(
            table,
            str(shard.rank),
            names.label(shard.node_id),
            *([stage(shard.layers.start, shard.layers.end)] if wide else []),
            state_text(shard_state(shard)),
            bar(usage.busy_fraction, _BAR_WIDTH) if told else "",
            percent(usage.busy_fraction) if told else dim("-"),
            size(shard.memory_bytes) if shard.memory_bytes else dim("-"),
            _cache(usage) if told else dim("-"),
            *([size(usage.prefix_cache_bytes) if told else dim("-")] if wide else []),
        )
    return table


def _cache(usage: runner_pb2.ShardUsage) -> str:
    if not usage.cache_limit_bytes:
        return size(usage.cache_bytes)
    return f"{size(usage.cache_bytes)} of {size(usage.cache_limit_bytes)}"
