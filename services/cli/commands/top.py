"""`shardring top`."""

import asyncio
import time

import click
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from services.cli.board import Board
from services.cli.render.top import top_picture
from services.cli.shell import Shell, as_dict, client_command
from shardring.runner.v1 import instance_service_pb2, runner_pb2

_REFRESH_SECONDS = 1.0


@client_command
@click.argument("instance_ids", metavar="[INSTANCE...]", nargs=-1)
@click.option("--once", is_flag=True, help="Print once and end.")
async def top(shell: Shell, instance_ids: tuple[str, ...], once: bool) -> None:
    """Watch what instances do, until Ctrl-C: tokens a second, requests running and queued, how full
    a step is; and of each rank how much of the time its stage computes, its memory, and how much of
    the room for key-value caches is taken.

    Figures are those of the last seconds. With --json it prints an instance whenever it changes.
    """
    board = Board(shell.cluster, instance_ids)
    await board.look()
    if once:
        if shell.json:
            shell.print_document({"instances": [as_dict(i) for i in board.instances]})
        else:
            shell.out.print(_picture(shell, board))
        return
    await board.follow(_print_changes(shell, board) if shell.json else _show(shell, board))


async def _show(shell: Shell, board: Board) -> None:
    """Draw one picture anew; off a terminal print one after the other, when there is news."""
    if shell.out.is_terminal:
        with Live(console=shell.out, auto_refresh=False) as live:
            while True:
                live.update(_picture(shell, board), refresh=True)
                await asyncio.sleep(_REFRESH_SECONDS)
    while True:
        board.changed.clear()
        shell.out.print(_picture(shell, board))
        await board.changed.wait()
        await asyncio.sleep(_REFRESH_SECONDS)


async def _print_changes(shell: Shell, board: Board) -> None:
    told: dict[str, runner_pb2.Instance] = {}
    while True:
        board.changed.clear()
        for instance in board.instances:
            if told.get(instance.instance_id) != instance:
                told[instance.instance_id] = instance
                shell.print_line(instance_service_pb2.WatchInstanceResponse(instance=instance))
        await board.changed.wait()


def _picture(shell: Shell, board: Board) -> RenderableType:
    picture = top_picture(
        board.instances, now=time.time(), width=shell.out.width, remarks=board.remarks
    )
    missing = [f"Node {label} was not asked: {why}" for label, why in board.unreachable.items()]
    if board.missing:
        missing.append(board.missing)
    return Group(picture, *(Text(text, style="yellow") for text in missing))
