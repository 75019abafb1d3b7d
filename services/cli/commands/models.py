"""`shardring models`."""

import asyncio
from collections.abc import Sequence

import click

from services.cli.names import NodeNames, names_of_nodes, resolve_nodes
from services.cli.render.downloads import verification_line
from services.cli.render.models import facts_table, models_table
from services.cli.shell import Shell, as_dict, client_command
from services.cli.text import listed
from services.cli.together import nodes_option, together
from services.cli.verifying import Verified, verify_all
from services.common.errors import Reason, ShardringError
from shardring.downloads.v1 import downloads_service_pb2


@client_command
@click.argument("model", default="")
@click.option(
    "--verify",
    is_flag=True,
    help="Read all files and compare their hashes with the hub's; remove what is corrupt.",
)
@nodes_option("Only this node. May be repeated.")
async def models(shell: Shell, model: str, verify: bool, node_texts: tuple[str, ...]) -> None:
    """Show which models are on which nodes' disks, in whole or in part, and the room left there.

    With MODEL: what its files say about it. With --verify: read what is on the disks, and exit
    with 1 when a file was corrupt.
    """
    found, topology = await asyncio.gather(shell.cluster.models(), shell.cluster.topology())
    names = names_of_nodes(topology.nodes)
    # A worker may be attached before, or longer than, topology knows its node.
    node_ids = {node.node_id for node in topology.nodes} | {disk.node_id for disk in found.disks}
    node_ids |= {fraction.node_id for entry in found.models for fraction in entry.fractions}
    if node_texts:
        node_ids = {node.node_id for node in resolve_nodes(topology.nodes, node_texts)}
    if verify:
        await _verify(shell, found, model, node_ids, names)
    elif model:
        await _facts(shell, found, model, sorted(node_ids), names)
    else:
        _show(shell, found, sorted(node_ids), names)


def _show(
    shell: Shell,
    found: downloads_service_pb2.ListModelsResponse,
    node_ids: Sequence[str],
    names: NodeNames,
) -> None:
    if shell.json:
        shell.print_document(found)
        return
    shell.out.print(models_table(found, node_ids, names, width=shell.out.width))
    strange = [
        entry.model_id
        for entry in found.models
        if entry.HasField("model") and not entry.model.engine_supported
    ]
    if strange:
        shell.remark(f"mlx-lm does not run {listed(strange)}.")
    if not found.models:
        shell.remark("No model is on any node's disk. Fetch one with: shardring download MODEL")


async def _facts(
    shell: Shell,
    found: downloads_service_pb2.ListModelsResponse,
    model_id: str,
    node_ids: Sequence[str],
    names: NodeNames,
) -> None:
    model = await shell.cluster.model(model_id, "")
    if shell.json:
        shell.print_document(downloads_service_pb2.GetModelResponse(model=model))
        return
    shell.out.print(facts_table(model))
    found = downloads_service_pb2.ListModelsResponse(
        models=[entry for entry in found.models if entry.model_id == model_id], disks=found.disks
    )
    if found.models:
        shell.out.print()
        shell.out.print(models_table(found, node_ids, names, width=shell.out.width))
    else:
        shell.remark("It is on no node's disk.")


async def _verify(
    shell: Shell,
    found: downloads_service_pb2.ListModelsResponse,
    model_id: str,
    node_ids: set[str],
    names: NodeNames,
) -> None:
    wanted: dict[str, dict[str, int]] = {}
    for entry in found.models:
        for fraction in entry.fractions:
            if model_id in ("", entry.model_id) and fraction.node_id in node_ids:
                wanted.setdefault(fraction.node_id, {})[entry.model_id] = fraction.downloaded_bytes
    if not wanted:
        what = repr(model_id) if model_id else "any model"
        raise ShardringError(
            Reason.MODEL_NOT_FOUND,
            f"No node asked has anything of {what} on its disk. See: shardring models",
            metadata={"model_id": model_id},
        )
    outcomes = await verify_all(shell, wanted, names)
    _report(shell, outcomes, names)
    failures = {
        f"{names.label(one.node_id)}: {one.model_id}": one.outcome
        for one in outcomes
        if isinstance(one.outcome, ShardringError)
    }
    if failures:
        raise together(failures)
    if any(_corrupt(one) for one in outcomes):
        raise click.exceptions.Exit(1)


def _report(shell: Shell, outcomes: Sequence[Verified], names: NodeNames) -> None:
    documents = []
    for one in outcomes:
        if isinstance(one.outcome, ShardringError):
            continue
        named = {"node_id": one.node_id, "model_id": one.model_id}
        documents.append({**named, "verification": as_dict(one.outcome)})
        if not shell.json:
            line = verification_line(one.model_id, names.label(one.node_id), one.outcome)
            shell.out.print(line, style="bold red" if _corrupt(one) else None)
    if shell.json:
        shell.print_document({"verifications": documents})


def _corrupt(one: Verified) -> bool:
    return not isinstance(one.outcome, ShardringError) and bool(one.outcome.corrupt_files)
