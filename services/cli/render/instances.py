"""Instances: their shards on the way to READY, and the list of all."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from services.cli.names import names_of_ranks
from services.cli.render.tables import add_row, bar, dim, new_table, state_text
from services.cli.text import age, duration, percent, quoted, rate, size, stage, whole_duration
from shardring.runner.v1 import runner_pb2

_RANKS_COLUMN = 3


def shard_state(shard: runner_pb2.Shard) -> str:
    """Return a shard state's name: "LOADING"; of one not known here, its number."""
    if shard.state not in runner_pb2.ShardState.values():
        return str(shard.state)
    return runner_pb2.ShardState.Name(shard.state).removeprefix("SHARD_STATE_")


def instance_state(instance: runner_pb2.Instance) -> str:
    """Return an instance state's name: "READY"; of one not known here, its number."""
    if instance.state not in runner_pb2.InstanceState.values():
        return str(instance.state)
    return runner_pb2.InstanceState.Name(instance.state).removeprefix("INSTANCE_STATE_")


def instance_progress(
    instance: runner_pb2.Instance, seconds_in_state: Sequence[float]
) -> RenderableType:
    """Return one row a rank: state, download, memory, and for how long it is in that state."""
    names = names_of_ranks(instance.placement)
    table = new_table("RANK", "NODE", "LAYERS", "STATE", "DOWNLOAD", "", ">MEMORY", ">FOR")
    for shard, seconds in zip(instance.shards, seconds_in_state, strict=True):
        add_row(
            table,
            str(shard.rank),
            names.label(shard.node_id),
            stage(shard.layers.start, shard.layers.end),
            state_text(shard_state(shard)),
            bar(shard.download_fraction),
            percent(shard.download_fraction),
            size(shard.memory_bytes) if shard.memory_bytes else dim("-"),
            whole_duration(seconds),
        )
    return table


def shard_line(instance: runner_pb2.Instance, shard: runner_pb2.Shard) -> str:
    """Return what one rank is doing as a line of plain text."""
    name = names_of_ranks(instance.placement).label(shard.node_id)
    line = f"rank {shard.rank} on {name}: {shard_state(shard)}"
    if shard.state == runner_pb2.SHARD_STATE_DOWNLOADING:
        line += f" {percent(shard.download_fraction)}"
    if shard.memory_bytes:
        line += f", {size(shard.memory_bytes)} in memory"
    return line


def where(instance: runner_pb2.Instance) -> str:
    """Return an instance's nodes and their stages, in rank order."""
    names = names_of_ranks(instance.placement)
    return ", ".join(
        f"{names.label(rank.node_id)} {stage(rank.layers.start, rank.layers.end)}"
        for rank in instance.placement.ranks
    )


def instances_table(
    instances: Sequence[runner_pb2.Instance], *, now: float, stacked: bool = False
) -> RenderableType:
    """Return one row an instance, and why failed ones failed. `now`: seconds since the epoch.

    `stacked`: a few lines an instance, one for each rank, for narrow terminals.
    """
    faults = [fault for instance in instances if (fault := instance_fault(instance))]
    if stacked:
        return Group(*(_block(instance, now) for instance in instances), *faults)
    table = new_table(
        *("INSTANCE", "MODEL", "STATE", "RANKS"),
        *(">MEMORY", ">TOKENS/S", ">RUNNING", ">QUEUED", ">AGE"),
    )
    # Folded inside a rank it could not be read.
    table.columns[_RANKS_COLUMN].no_wrap = True
    for instance in instances:
        memory = sum(shard.memory_bytes for shard in instance.shards)
        # Only the head says what it is doing.
        load = instance.load if instance.HasField("load") else None
        add_row(
            table,
            instance.instance_id,
            instance.placement.model_id,
            state_text(instance_state(instance)),
            _ranks(instance, " "),
            size(memory) if memory else dim("-"),
            rate(load.completion_tokens_per_second) if load else dim("-"),
            str(load.running_count) if load else dim("-"),
            str(load.queued_count) if load else dim("-"),
            instance_age(instance, now),
        )
    return Group(table, *faults)


def instance_title(instance: runner_pb2.Instance, now: float) -> Text:
    """Return an instance's id, state, model and age as a line. `now`: seconds since the epoch."""
    title = Text(instance.instance_id, style="bold", overflow="fold").append("  ")
    title.append_text(state_text(instance_state(instance)))
    rest = f"  {instance.placement.model_id}  {instance_age(instance, now)} old"
    return title.append(rest, style="default not bold")


def instance_figures(instance: runner_pb2.Instance) -> str:
    """Return what an instance is doing and its memory as a line; empty when neither is known."""
    parts = []
    if instance.HasField("load"):
        load = instance.load
        parts.append(f"{rate(load.completion_tokens_per_second)} tokens/s")
        if load.prompt_tokens_per_second:
            parts.append(f"prompts {rate(load.prompt_tokens_per_second)}/s")
        parts += [f"{load.running_count} running", f"{load.queued_count} queued"]
        if load.batch_occupancy:
            parts.append(f"{load.batch_occupancy:.1f} a step")
    if memory := sum(shard.memory_bytes for shard in instance.shards):
        parts.append(size(memory))
    return " · ".join(parts)


def instance_age(instance: runner_pb2.Instance, now: float) -> str:
    """Return since when an instance has been there. `now`: seconds since the epoch."""
    return age(now - instance.create_time.ToNanoseconds() / 1e9)


def instance_fault(instance: runner_pb2.Instance) -> Text | None:
    """Return why an instance failed as a line; None when it did not."""
    if not instance.HasField("error"):
        return None
    fault = Text(f"{instance.instance_id}: {instance.error.message} ", style="red")
    return fault.append(instance.error.reason, style="dim")


def completion_line(completion: runner_pb2.Completion) -> str:
    """Return a generation's figures: tokens, tokens a second, time to the first token."""
    tokens = completion.completion_token_count
    stopped = completion.finish_reason == runner_pb2.FINISH_REASON_STOP
    # The first token comes at the end of the prompt; the end token, not counted, took a step too.
    steps = tokens if stopped else tokens - 1
    decode = completion.decode_duration.ToNanoseconds() / 1e9
    first = completion.queue_duration.ToNanoseconds() + completion.prompt_duration.ToNanoseconds()
    parts = [f"{tokens} tokens" if tokens != 1 else "1 token"]
    if steps > 0 and decode > 0:
        parts.append(f"{steps / decode:.1f} tokens/s")
    parts += [
        f"first token after {duration(first / 1e9)}",
        f"prompt of {completion.prompt_token_count} tokens",
    ]
    if completion.cached_token_count:
        parts[-1] += f" ({completion.cached_token_count} kept from before)"
    if completion.HasField("stop_text"):
        parts.append(f"stopped before {quoted(completion.stop_text)}")
    if completion.finish_reason == runner_pb2.FINISH_REASON_LENGTH:
        parts.append("cut off by the length limit")
    return ", ".join(parts)


def _block(instance: runner_pb2.Instance, now: float) -> RenderableType:
    lines = Text(figures := instance_figures(instance)).append("\n" if figures else "")
    ranks = lines.append_text(_ranks(instance, "\n"))
    return Group(instance_title(instance, now), Padding(ranks, (0, 0, 0, 2), expand=False))


def _ranks(instance: runner_pb2.Instance, separator: str) -> Text:
    names = names_of_ranks(instance.placement)
    text = Text(overflow="fold")
    for shard in instance.shards:
        if text:
            text.append(separator)
        text.append(f"{names.label(shard.node_id)}:{stage(shard.layers.start, shard.layers.end)}:")
        text.append_text(state_text(shard_state(shard)))
    return text
