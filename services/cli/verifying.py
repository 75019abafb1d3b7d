"""Verifying models on nodes: all nodes at once, on each one model after the other."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, aclosing, nullcontext
from dataclasses import dataclass

from rich.console import Console, RenderableType
from rich.live import Live

from services.cli.names import NodeNames
from services.cli.render.downloads import verifying_line, verifying_progress
from services.cli.shell import Shell
from services.common.errors import Reason, ShardringError
from shardring.downloads.v1 import downloads_service_pb2

_REFRESHES_PER_SECOND = 5
_LINE_SECONDS = 5.0


@dataclass(frozen=True)
class Verified:
    """What verifying a model on a node gave: what was found, or why it could not be done."""

    node_id: str
    model_id: str
    outcome: downloads_service_pb2.Verification | ShardringError


@dataclass
class _Node:
    """How far a node is: the model it is at, its bytes before that one, of it, and in all."""

    model_id: str = ""
    before: int = 0
    now: int = 0
    total: int = 0
    told: float = 0.0


async def verify_all(
    shell: Shell, wanted: Mapping[str, Mapping[str, int]], names: NodeNames
) -> list[Verified]:
    """Verify models by node id, each with the bytes it has on disk; return all outcomes."""
    console = Console(quiet=True) if shell.json else shell.err
    progress = {node_id: _Node(total=sum(models.values())) for node_id, models in wanted.items()}
    outcomes: list[Verified] = []

    async def verify(node_id: str, models: Mapping[str, int]) -> None:
        state = progress[node_id]
        for model_id, size_bytes in sorted(models.items()):
            state.model_id = model_id
            try:
                outcome = await _follow(shell, node_id, model_id, state, names, console)
                outcomes.append(Verified(node_id, model_id, outcome))
            except ShardringError as error:
                outcomes.append(Verified(node_id, model_id, error))
            state.before, state.now = state.before + size_bytes, 0
        state.model_id = ""

    ordered = sorted(wanted, key=names.label)
    with _live(console, ordered, progress, names):
        await asyncio.gather(*(verify(node_id, models) for node_id, models in wanted.items()))
    return sorted(outcomes, key=lambda one: (names.label(one.node_id), one.model_id))


async def _follow(
    shell: Shell,
    node_id: str,
    model_id: str,
    state: _Node,
    names: NodeNames,
    console: Console,
) -> downloads_service_pb2.Verification:
    async with aclosing(shell.cluster.verify_model(node_id, model_id)) as steps:
        async for step in steps:
            state.now = step.verified_bytes
            if step.done:
                return step
            now = time.monotonic()
            if not console.is_terminal and step.total_bytes and now - state.told >= _LINE_SECONDS:
                state.told = now
                figures = (step.verified_bytes, step.total_bytes)
                console.out(verifying_line(names.label(node_id), model_id, *figures))
    raise ShardringError(
        Reason.SHUTTING_DOWN, "The downloads service ended the verification; is it stopping?"
    )


def _live(
    console: Console, ordered: Sequence[str], progress: Mapping[str, _Node], names: NodeNames
) -> AbstractContextManager[object]:
    if not console.is_terminal:
        return nullcontext()

    def render() -> RenderableType:
        rows = []
        for node_id in ordered:
            state = progress[node_id]
            done = min(state.before + state.now, state.total)
            rows.append((names.label(node_id), state.model_id, done, state.total))
        return verifying_progress(rows, width=console.width)

    return Live(
        get_renderable=render,
        console=console,
        refresh_per_second=_REFRESHES_PER_SECOND,
        transient=True,
    )
