"""The options of every command that has a model placed."""

from collections.abc import Callable, Sequence
from typing import Any

import click

from services.cli.client import Cluster
from services.cli.instances import Wanted
from services.cli.names import resolve_nodes
from services.cli.shell import INT32
from shardring.placement.v1 import placement_service_pb2

_OPTIONS = (
    click.option(
        "--min-nodes", type=INT32, default=0, help="Use at least this many nodes; 0: as few as can."
    ),
    click.option(
        "--require", multiple=True, metavar="NODE", help="Use this node too. May be repeated."
    ),
    click.option(
        "--exclude", multiple=True, metavar="NODE", help="Keep off this node. May be repeated."
    ),
    click.option("--revision", default="", help="Branch, tag or commit.  [default: main]"),
)


def placing_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options that `wanted_placement` takes."""
    for add in reversed(_OPTIONS):
        command = add(command)
    return command


async def wanted_placement(
    cluster: Cluster,
    model_id: str,
    *,
    min_nodes: int,
    require: Sequence[str],
    exclude: Sequence[str],
    revision: str,
) -> Wanted:
    """Return what is wanted; asks topology for the named nodes only when some are named.

    Raises as `names.resolve_node`. Figures are passed on as they are: placement judges them.
    """
    nodes = (await cluster.topology()).nodes if require or exclude else []
    return Wanted(
        model_id,
        revision,
        placement_service_pb2.PlacementConstraints(
            min_node_count=min_nodes,
            required_node_ids=[node.node_id for node in resolve_nodes(nodes, require)],
            excluded_node_ids=[node.node_id for node in resolve_nodes(nodes, exclude)],
        ),
    )
