"""Showing the topology at every change, until the user has seen enough."""

import asyncio
import contextlib
from collections.abc import Callable
from contextlib import aclosing

from rich.console import RenderableType
from rich.live import Live

from services.cli.shell import Shell
from services.common.errors import Reason, ShardringError
from shardring.topology.v1 import topology_pb2

_RECONNECT_SECONDS = 1.0
_REFRESH_SECONDS = 3.0
_GONE = frozenset({Reason.SERVICE_UNAVAILABLE, Reason.SERVICE_TIMEOUT, Reason.SHUTTING_DOWN})


async def watch(
    shell: Shell,
    document: Callable[[topology_pb2.Topology], topology_pb2.Topology],
    shown: Callable[[topology_pb2.Topology], RenderableType],
) -> None:
    """Show the topology now and at each change, for as long as it runs.

    On a terminal one picture that is drawn anew; elsewhere one after the other, or with --json
    one object a line. A service that goes away is waited for, once it has answered at all.
    """
    if shell.json:
        await _follow(shell, lambda topology: shell.print_line(document(topology)))
    elif not shell.out.is_terminal:
        await _follow(shell, lambda topology: shell.out.print(shown(topology)))
    else:
        with Live(console=shell.out, auto_refresh=False) as live:

            def show(topology: topology_pb2.Topology) -> None:
                live.update(shown(topology), refresh=True)

            refreshing = asyncio.create_task(_refresh(shell, show), name="refresh")
            try:
                await _follow(shell, show)
            finally:
                refreshing.cancel()
                await asyncio.wait([refreshing])


async def _refresh(shell: Shell, show: Callable[[topology_pb2.Topology], None]) -> None:
    """Keep up what drifts without being a change: ages, memory and round trips."""
    while True:
        await asyncio.sleep(_REFRESH_SECONDS)
        with contextlib.suppress(ShardringError):  # `_follow` tells of it
            show(await shell.cluster.topology())


async def _follow(shell: Shell, show: Callable[[topology_pb2.Topology], None]) -> None:
    answered = lost = False
    while True:
        try:
            async with aclosing(shell.cluster.watch_topology()) as changes:
                async for topology in changes:
                    answered, lost = True, False
                    show(topology)
        except ShardringError as error:
            if error.reason is not Reason.REVISION_COMPACTED:
                if not answered or error.reason not in _GONE:
                    raise
                if not lost:
                    shell.remark(f"{error.message} Waiting for it.")
                lost = True
        await asyncio.sleep(_RECONNECT_SECONDS)
