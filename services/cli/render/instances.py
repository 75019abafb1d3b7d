"""Instances: their shards on the way to READY, and the list of all."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from services.cli.names import names_of_ranks
from services.cli.render.tables import add_row, bar, dim, new_table, state_text
from services.cli.text import age, duration, percent, size, stage, whole_duration
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

    `stacked`: ranks stand one below the other, for narrow terminals.
    """
    table = new_table("INSTANCE", "MODEL", "STATE", "RANKS", ">MEMORY", ">REQUESTS", ">AGE")
    # Folded inside a rank it could not be read.
    table.columns[_RANKS_COLUMN].no_wrap = True
    faults: list[Text] = []
    for instance in instances:
        memory = sum(shard.memory_bytes for shard in instance.shards)
        add_row(
            table,
            instance.instance_id,
            instance.placement.model_id,
            state_text(instance_state(instance)),
            _ranks(instance, "\n" if stacked else " "),
            size(memory) if memory else dim("-"),
            str(instance.request_count),
            age(now - instance.create_time.ToNanoseconds() / 1e9),
        )
        if instance.HasField("error"):
            fault = Text(f"{instance.instance_id}: {instance.error.message} ", style="red")
            faults.append(fault.append(instance.error.reason, style="dim"))
    return Group(table, *faults)


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
    if completion.finish_reason == runner_pb2.FINISH_REASON_LENGTH:
        parts.append("cut off by the length limit")
    return ", ".join(parts)


def _ranks(instance: runner_pb2.Instance, separator: str) -> Text:
    names = names_of_ranks(instance.placement)
    text = Text()
    for shard in instance.shards:
        if text:
            text.append(separator)
        text.append(f"{names.label(shard.node_id)}:{stage(shard.layers.start, shard.layers.end)}:")
        text.append_text(state_text(shard_state(shard)))
    return text
