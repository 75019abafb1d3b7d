"""The options of every command that has a model placed."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import click

from services.cli.client import Cluster
from services.cli.instances import Wanted
from services.cli.names import resolve_nodes
from services.cli.shell import INT32
from services.common.errors import invalid_field
from shardring.placement.v1 import placement_pb2, placement_service_pb2
from shardring.runner.v1 import runner_pb2
from shardring.topology.v1 import topology_pb2

MAX_GB = 1e6
_COUNT = re.compile(r"[0-9]{1,9}")
_OBJECTIVES = {
    "default": placement_pb2.OBJECTIVE_UNSPECIFIED,
    "latency": placement_pb2.OBJECTIVE_DECODE_LATENCY,
    "throughput": placement_pb2.OBJECTIVE_THROUGHPUT,
}

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
    click.option(
        "--layers",
        multiple=True,
        metavar="NODE=COUNT",
        help="Give this node just so many layers. May be repeated; the others share the rest.",
    ),
    click.option(
        "--max-layers",
        multiple=True,
        metavar="NODE=COUNT",
        help="Give this node so many layers at most. May be repeated.",
    ),
    click.option(
        "--context",
        type=INT32,
        default=0,
        help="Keep memory for the key-value cache of this many tokens; 0: none.",
    ),
    click.option(
        "--concurrent", type=INT32, default=0, help="... for this many requests at a time; 0: one."
    ),
    click.option(
        "--keep-free-gb",
        type=float,
        default=0.0,
        help="Leave this much more memory free on each node, in GB (10^9 bytes).",
    ),
    click.option(
        "--objective",
        type=click.Choice(list(_OBJECTIVES)),
        default="default",
        show_default=True,
        help="What to be best at: the usual rules, or the predicted time from token to token of "
        "one request, or the predicted tokens per second of many.",
    ),
    click.option("--revision", default="", help="Branch, tag or commit.  [default: main]"),
)


_CACHE_OPTIONS = (
    click.option(
        "--cache-bits",
        type=INT32,
        default=0,
        help="Quantize the key-value cache to 4 or 8 bits a value; 0: as the model computes it.",
    ),
    click.option(
        "--max-cache-tokens",
        type=INT32,
        default=0,
        help="Keep but so many tokens of each request in the cache, the first four and the "
        "latest; 0: all.",
    ),
)


def cache_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options of `wanted_placement` that say how an instance is run."""
    for add in reversed(_CACHE_OPTIONS):
        command = add(command)
    return command


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
    layers: Sequence[str],
    max_layers: Sequence[str],
    context: int,
    concurrent: int,
    keep_free_gb: float,
    objective: str,
    revision: str,
    cache_bits: int = 0,
    max_cache_tokens: int = 0,
) -> Wanted:
    """Return what is wanted; asks topology for the named nodes only when some are named.

    Raises as `names.resolve_node`. Figures are passed on as they are: placement judges them.
    """
    named = (*require, *exclude, *layers, *max_layers)
    nodes = (await cluster.topology()).nodes if named else []
    if not -MAX_GB <= keep_free_gb <= MAX_GB:
        raise invalid_field("keep_free_gb", keep_free_gb, f"0 to {MAX_GB:.0f}")
    return Wanted(
        model_id,
        revision,
        placement_service_pb2.PlacementConstraints(
            min_node_count=min_nodes,
            required_node_ids=[node.node_id for node in resolve_nodes(nodes, require)],
            excluded_node_ids=[node.node_id for node in resolve_nodes(nodes, exclude)],
            layer_counts=_counts(nodes, "layers", layers),
            max_layer_counts=_counts(nodes, "max_layers", max_layers),
            context_token_count=context,
            concurrent_request_count=concurrent,
            headroom_bytes=round(keep_free_gb * 1e9),
        ),
        _OBJECTIVES[objective],
        runner_pb2.InstanceOptions(cache_bits=cache_bits, max_cache_token_count=max_cache_tokens),
    )


def _counts(
    nodes: Sequence[topology_pb2.Node], option: str, given: Sequence[str]
) -> dict[str, int]:
    """Return node ids with their numbers from "NODE=COUNT". Raises INVALID_FIELD."""
    counts: dict[str, int] = {}
    for text in given:
        name, _, count = text.rpartition("=")
        if not name or not _COUNT.fullmatch(count):
            raise invalid_field(option, text, "NODE=COUNT, such as studio-1=12")
        (node,) = resolve_nodes(nodes, [name])
        counts[node.node_id] = int(count)
    return counts
