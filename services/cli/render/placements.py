"""Placements: what each node of a ring holds, and how the ring is joined."""

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from services.cli.names import names_of_ranks
from services.cli.render.nodes import backend_name
from services.cli.render.tables import add_row, bar, new_table, share
from services.cli.text import count, size, stage
from shardring.common.v1 import common_pb2
from shardring.placement.v1 import placement_pb2, placement_service_pb2


def placement_table(placement: placement_pb2.Placement) -> Table:
    """Return one row a rank: its node, its stage, and what that takes of the node's memory."""
    names = names_of_ranks(placement)
    table = new_table("RANK", "NODE", "LAYERS", ">COUNT", ">NEEDS", ">AVAILABLE", "", "", "BACKEND")
    for rank in placement.ranks:
        start, end = rank.layers.start, rank.layers.end
        needed, available = rank.weight_bytes + rank.cache_bytes, rank.memory_available_bytes
        add_row(
            table,
            str(rank.rank),
            names.label(rank.node_id),
            stage(start, end),
            str(end - start),
            size(needed),
            size(available),
            bar(needed / available if available else 0.0),
            share(needed, available),
            backend_name(rank.backend),
        )
    return table


def host_lists(placement: placement_pb2.Placement) -> RenderableType:
    """Return each rank's own MLX host list, one row a rank, one column for whom it reaches."""
    if len(placement.ranks) == 1:
        return Text("A ring of one needs no host list.", style="dim")
    names = names_of_ranks(placement)
    table = new_table("RANK", "NODE", *(f"REACHES {rank.rank} AT" for rank in placement.ranks))
    for rank in placement.ranks:
        add_row(table, str(rank.rank), names.label(rank.node_id), *rank.hosts)
    return table


def score_line(placement: placement_pb2.Placement) -> str:
    """Return why this ring was chosen, in the order in which it counts."""
    score = placement.score
    parts = [
        *(["with a leaf"] if score.has_leaf else []),
        f"download score {score.download_score:.2f}",
        f"{size(score.memory_available_bytes)} available",
        f"of {count(score.candidate_count, 'ring')} looked at"
        if score.proven_optimal
        else "a better ring may exist",
    ]
    if score.HasField("slowest_hop") and score.slowest_hop.HasField("round_trip"):
        hop, names = score.slowest_hop, names_of_ranks(placement)
        milliseconds = hop.round_trip.ToNanoseconds() / 1e6
        ends = f"{names.label(hop.source_node_id)} and {names.label(hop.sink_node_id)}"
        parts.append(f"slowest hop {milliseconds:.2f} ms, between {ends}")
    return ", ".join(parts)


def first_placement(
    response: placement_service_pb2.PreviewPlacementsResponse,
) -> placement_pb2.Placement | None:
    """Return what `up` takes: the first that can be placed; None when nothing can."""
    placements = (p.placement for p in response.previews if p.HasField("placement"))
    return next(placements, None)


def _way(preview: placement_service_pb2.Preview) -> str:
    """Return what sets a preview apart from the usual pipeline on the MLX ring."""
    words = []
    if preview.sharding == common_pb2.SHARDING_TENSOR:
        words.append("tensor")
    if preview.ring_backend == common_pb2.RING_BACKEND_JACCL:
        words.append("JACCL")
    return "".join(f", {word}" for word in words)


def previews(
    response: placement_service_pb2.PreviewPlacementsResponse, *, hosts: bool = False
) -> RenderableType:
    """Return a paragraph for each ring size: the placement, or the refusal in words.

    The first size that can be placed is what `up` takes. `hosts` adds the host lists.
    """
    parts: list[RenderableType] = []
    chosen = False
    for preview in response.previews:
        way = _way(preview)
        heading = Text(count(preview.node_count, "node") + way, style="bold")
        if preview.WhichOneof("outcome") == "placement":
            placement = preview.placement
            if not chosen and not way:
                heading.append(" (taken by up and run)", style="green")
                chosen = True
            heading.append(f" - {score_line(placement)}", style="not bold dim")
            body: list[RenderableType] = [placement_table(placement)]
            if hosts:
                body.append(host_lists(placement))
        else:
            refusal = preview.refusal
            body = [Text.assemble((refusal.reason, "red"), f"  {refusal.message}")]
        parts.append(heading)
        parts += [Padding(part, (0, 0, 0, 2), expand=False) for part in body]
    return Group(*parts)
