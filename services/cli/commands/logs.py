"""`shardring logs`."""

import asyncio

import click

from services.cli.census import Census, take_census
from services.cli.names import names_of_nodes, names_of_ranks
from services.cli.shell import INT32, Shell, as_dict, client_command
from services.cli.text import without_controls
from services.common.errors import ShardringError, invalid_field
from shardring.runner.v1 import runner_pb2
from shardring.topology.v1 import topology_pb2


@client_command
@click.argument("instance_id", metavar="INSTANCE")
@click.option("--rank", type=INT32, help="Show this rank only.")
async def logs(shell: Shell, instance_id: str, rank: int | None) -> None:
    """Show what the processes of an instance's ranks wrote to their logs last, 50 lines each.

    They are kept as long as the instance is listed, so the last words of a rank that failed are
    here. Every line says whose it is.
    """
    census = await take_census(shell.cluster)
    instance = census.find(instance_id)
    world_size = len(instance.placement.ranks)
    if rank is not None and not 0 <= rank < world_size:
        raise invalid_field("rank", rank, f"0 to {world_size - 1}")
    lines, failures = await _ask(shell, census, instance)
    shown = [shard for shard in instance.shards if rank in (None, shard.rank)]
    if shell.json:
        for shard in shown:
            shard.log_lines[:] = lines.get(shard.rank, ())
        shell.print_document(
            {
                "shards": [as_dict(shard) for shard in shown],
                "unreachable_nodes": sorted({*census.unreachable, *failures}),
            }
        )
        return
    names = names_of_ranks(instance.placement)
    labels = {s.rank: f"rank {s.rank} {names.label(s.node_id)}" for s in shown}
    width = max(map(len, labels.values()), default=0)
    for shard in shown:
        for line in lines.get(shard.rank, ()):
            text = without_controls(line) if shell.out.is_terminal else line
            shell.out.print(f"{labels[shard.rank]:<{width}} | {text}", soft_wrap=True)
    if not any(lines.get(shard.rank) for shard in shown):
        shell.remark("Nothing was logged.")
    for label, why in sorted({**census.unreachable, **failures}.items()):
        shell.remark(f"Node {label} was not asked: {why.message}")


async def _ask(
    shell: Shell, census: Census, instance: runner_pb2.Instance
) -> tuple[dict[int, list[str]], dict[str, ShardringError]]:
    """Return each rank's lines, and why nodes did not answer, by their labels.

    Every node knows its own rank's; of one that FAILED, others may know them too.
    """
    holders = census.holders[instance.instance_id]
    names = names_of_nodes(holders)

    async def ask(node: topology_pb2.Node) -> runner_pb2.Instance | ShardringError:
        label = names.label(node.node_id)
        try:
            runner = shell.cluster.runner(node.node_id, label, node.endpoints)
            return await runner.get(instance.instance_id)
        except ShardringError as error:
            return error

    lines: dict[int, list[str]] = {}
    failures: dict[str, ShardringError] = {}
    answers = await asyncio.gather(*map(ask, holders))
    for node, answer in zip(holders, answers, strict=True):
        if isinstance(answer, ShardringError):
            failures[names.label(node.node_id)] = answer
            continue
        if answer.placement != instance.placement:
            continue  # an earlier start under the same id
        for shard in answer.shards:
            if shard.log_lines and (shard.rank == answer.rank or shard.rank not in lines):
                lines[shard.rank] = list(shard.log_lines)
    return lines, failures
