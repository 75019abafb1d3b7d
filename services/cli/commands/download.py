"""`shardring download`."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing

import click
from rich.console import Console

from services.cli.follow import DOWNLOAD_ENDS, follow_downloads
from services.cli.names import NodeNames, names_of_nodes, resolve_nodes
from services.cli.render.downloads import download_line
from services.cli.shell import Shell, client_command
from services.cli.together import nodes_option, together
from services.common.errors import Reason, ShardringError
from services.common.status import error_from_proto
from shardring.downloads.v1 import downloads_pb2, downloads_service_pb2
from shardring.topology.v1 import topology_pb2

_HINT = "Ctrl-C cancels what this command started; what was fetched stays on disk."


@client_command
@click.argument("model")
@nodes_option("Only to this node. May be repeated.")
@click.option("--revision", default="", help="Branch, tag or commit.  [default: main]")
async def download(shell: Shell, model: str, node_texts: tuple[str, ...], revision: str) -> None:
    """Fetch MODEL ("organisation/name") to the disk of every node, or of those given.

    Ctrl-C cancels what this command started; what was fetched stays, and the next try goes on
    from there. Exits with 1 when a node could not fetch it.
    """
    nodes = await _chosen(shell, node_texts)
    names = names_of_nodes(nodes)
    earlier = {
        one.download_id
        for one in await shell.cluster.list_downloads(model)
        if one.state not in DOWNLOAD_ENDS
    }
    started: list[downloads_pb2.Download] = []
    refusals: dict[str, ShardringError] = {}

    async def start(node: topology_pb2.Node) -> None:
        try:
            started.append(await shell.cluster.start_download(node.node_id, model, revision))
        except ShardringError as error:
            refusals[names.label(node.node_id)] = error

    try:
        await asyncio.gather(*map(start, nodes))
        ended = await _follow(shell, started, names)
    except BaseException:
        await _cancel(shell, [one for one in started if one.download_id not in earlier], names)
        raise
    failures = refusals | {names.label(one.node_id): why for one in ended if (why := _fault(one))}
    if failures:
        raise together(failures)


async def _chosen(shell: Shell, texts: Sequence[str]) -> list[topology_pb2.Node]:
    nodes = list((await shell.cluster.topology()).nodes)
    if texts:
        return resolve_nodes(nodes, texts)
    if not nodes:
        raise ShardringError(
            Reason.NO_NODES, "No node is alive to fetch to. Start one with: shardring node"
        )
    return nodes


async def _follow(
    shell: Shell, started: Sequence[downloads_pb2.Download], names: NodeNames
) -> list[downloads_pb2.Download]:
    """Return `started` as they ended; none started: at once, for no ids would mean all."""
    if not started:
        return []

    def tell(ended: downloads_pb2.Download) -> None:
        # Where both go to a terminal, the last picture says the same.
        if not (shell.out.is_terminal and shell.err.is_terminal):
            shell.out.print(download_line(ended, names))

    ids = [one.download_id for one in started]
    async with aclosing(shell.cluster.watch_downloads(ids)) as updates:
        if not shell.json:
            return await follow_downloads(updates, started, names, shell.err, tell, _HINT)
        shell.print_line(downloads_service_pb2.WatchDownloadsResponse(downloads=started))
        return await follow_downloads(
            _printed(shell, updates), started, names, Console(quiet=True), lambda _: None
        )


async def _printed(
    shell: Shell, updates: AsyncIterator[Sequence[downloads_pb2.Download]]
) -> AsyncIterator[Sequence[downloads_pb2.Download]]:
    async for downloads in updates:
        shell.print_line(downloads_service_pb2.WatchDownloadsResponse(downloads=downloads))
        yield downloads


async def _cancel(
    shell: Shell, started: Sequence[downloads_pb2.Download], names: NodeNames
) -> None:
    for one in started:
        label = names.label(one.node_id)
        try:
            await shell.cluster.cancel_download(one.download_id)
        except ShardringError as error:
            shell.remark(f"Download {one.download_id} may still run: {error.message}")
        else:
            shell.remark(f"{label}: cancelled; what was fetched stays on disk.")


def _fault(ended: downloads_pb2.Download) -> ShardringError | None:
    """Return why a download that has ended brought no model; None when it did."""
    if ended.state == downloads_pb2.DOWNLOAD_STATE_COMPLETED:
        return None
    if ended.HasField("error"):
        return error_from_proto(ended.error)
    return ShardringError(
        Reason.DOWNLOAD_FAILED,
        "The download was cancelled.",
        metadata={"download_id": ended.download_id, "node_id": ended.node_id},
    )
