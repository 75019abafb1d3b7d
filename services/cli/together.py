"""What several nodes say, as one command says it: which nodes are meant, and one error for all."""

from collections.abc import Callable, Mapping
from typing import Any

import click

from services.common.errors import Reason, ShardringError


def _split(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(text for value in values for text in value.split(",") if text)


def nodes_option(help_text: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the option that names nodes, one or several a time, as `node_texts`."""
    return click.option(
        "--node",
        "--nodes",
        "node_texts",
        multiple=True,
        callback=_split,
        metavar="NODE[,NODE...]",
        help=help_text,
    )


def together(failures: Mapping[str, ShardringError]) -> ShardringError:
    """Return one error for failures by node label, with their reason if they share one."""
    reasons = {error.reason for error in failures.values()}
    nodes: dict[str, list[str]] = {}
    for label, error in sorted(failures.items()):
        nodes.setdefault(error.message, []).append(label)
    metadata = next(iter(failures.values())).metadata if len(failures) == 1 else {}
    return ShardringError(
        reasons.pop() if len(reasons) == 1 else Reason.DOWNLOAD_FAILED,
        "\n".join(f"{', '.join(labels)}: {message}" for message, labels in nodes.items()),
        metadata={**metadata},
    )
