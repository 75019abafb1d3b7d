"""Showing what goes on while it goes on: a live table on a terminal, plain lines elsewhere."""

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from rich.console import Console, RenderableType
from rich.live import Live

from services.cli.names import NodeNames
from services.cli.render.downloads import download_line, downloads_progress
from services.cli.render.instances import instance_progress, shard_line
from services.common.errors import Reason, ShardringError
from shardring.downloads.v1 import downloads_pb2
from shardring.runner.v1 import runner_pb2

_REFRESHES_PER_SECOND = 5
# Off a terminal a line tells of each such part of a shard's download.
_STEPS = 4
# Off a terminal, between two lines about a download that goes on.
_LINE_SECONDS = 5.0

DOWNLOAD_ENDS = (
    downloads_pb2.DOWNLOAD_STATE_COMPLETED,
    downloads_pb2.DOWNLOAD_STATE_FAILED,
    downloads_pb2.DOWNLOAD_STATE_CANCELLED,
)


def settled(instance: runner_pb2.Instance) -> bool:
    """Return whether an instance that was started is READY or over."""
    return instance.state in (
        runner_pb2.INSTANCE_STATE_READY,
        runner_pb2.INSTANCE_STATE_STOPPED,
        runner_pb2.INSTANCE_STATE_FAILED,
    )


async def follow_instance(
    changes: AsyncIterator[runner_pb2.Instance], console: Console
) -> runner_pb2.Instance:
    """Show an instance at each change; return it once it is READY, STOPPED or FAILED.

    `changes` are those of `RunnerClient.watch`, whose errors pass through.
    """
    progress = _InstanceProgress(console)
    with progress.shown():
        async for instance in changes:
            progress.take(instance)
            if settled(instance):
                return instance
    raise ShardringError(Reason.SHUTTING_DOWN, "The node ended the watch; is it stopping?")


async def follow_downloads(
    updates: AsyncIterator[Sequence[downloads_pb2.Download]],
    started: Sequence[downloads_pb2.Download],
    names: NodeNames,
    console: Console,
    on_end: Callable[[downloads_pb2.Download], None] | None = None,
    hint: str = "",
) -> list[downloads_pb2.Download]:
    """Show downloads until all `started` ones have ended; return them as they then are.

    `updates` are those of `Cluster.watch_downloads`, whose errors pass through. `on_end` hears of
    each that has ended, once, in place of the console. On a terminal `hint` stands below.
    """
    current = {download.download_id: download for download in started}
    ended: set[str] = set()
    lines = _Lines(console)

    def take(downloads: Sequence[downloads_pb2.Download]) -> None:
        for download in downloads:
            current[download.download_id] = download
            over = download.state in DOWNLOAD_ENDS
            if not over or on_end is None:
                key = (download.state, 0 if over else int(time.monotonic() / _LINE_SECONDS))
                lines.tell(download.download_id, key, partial(download_line, download, names))
            elif download.download_id not in ended:
                ended.add(download.download_id)
                on_end(download)

    def render() -> RenderableType:
        shown = list(current.values())
        return downloads_progress(shown, names, width=console.width, hint="" if done() else hint)

    def done() -> bool:
        return all(download.state in DOWNLOAD_ENDS for download in current.values())

    with _live(console, render):
        take(started)
        if not done():
            async for downloads in updates:
                take(downloads)
                if done():
                    break
            else:
                raise ShardringError(
                    Reason.SHUTTING_DOWN, "The downloads service ended the watch; is it stopping?"
                )
    return list(current.values())


class _InstanceProgress:
    """Keeps since when each rank is in its state, on this machine's clock."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._lines = _Lines(console)
        self._instance = runner_pb2.Instance()
        self._since: dict[int, tuple[int, float]] = {}

    def shown(self) -> AbstractContextManager[object]:
        """Return the display, to be entered."""
        return _live(self._console, self._render)

    def take(self, instance: runner_pb2.Instance) -> None:
        """Note a change."""
        for shard in instance.shards:
            state, _ = self._since.get(shard.rank, (-1, 0.0))
            if state != shard.state:
                self._since[shard.rank] = (shard.state, time.monotonic())
            step = int(shard.download_fraction * _STEPS)
            downloading = shard.state == runner_pb2.SHARD_STATE_DOWNLOADING
            key = (shard.state, step if downloading else 0)
            self._lines.tell(str(shard.rank), key, partial(shard_line, instance, shard))
        self._instance = instance

    def _render(self) -> RenderableType:
        now = time.monotonic()
        instance = self._instance
        return instance_progress(
            instance, [now - self._since[shard.rank][1] for shard in instance.shards]
        )


class _Lines:
    """Prints a line about a thing when its key changed; nothing on a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._told: dict[str, object] = {}

    def tell(self, name: str, key: object, line: Callable[[], str]) -> None:
        """Print `line()` unless this was told already."""
        if not self._console.is_terminal and self._told.get(name) != key:
            self._told[name] = key
            self._console.out(line(), highlight=False)


def _live(console: Console, render: Callable[[], RenderableType]) -> AbstractContextManager[object]:
    """Return a display that draws `render()` a few times a second; nothing off a terminal."""
    if not console.is_terminal:
        return nullcontext()
    return Live(get_renderable=render, console=console, refresh_per_second=_REFRESHES_PER_SECOND)
