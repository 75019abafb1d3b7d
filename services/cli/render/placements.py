"""Placements: what each node of a ring holds, and how the ring is joined."""

from google.protobuf import duration_pb2
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
    if predicted := predicted_line(placement):
        parts.append(predicted)
    return ", ".join(parts)


def predicted_line(placement: placement_pb2.Placement) -> str:
    """Return how fast a placement should be; empty where that is not known."""
    if not placement.HasField("predicted_speed"):
        return ""
    predicted = placement.predicted_speed
    nodes = [rank.node_id for rank in placement.ranks]
    names, slowest = names_of_ranks(placement), predicted.slowest
    if slowest.WhichOneof("part") == "stage_rank":
        where = f"the stage of {names.label(nodes[slowest.stage_rank])}"
    else:
        after = (slowest.hop_rank + 1) % len(nodes)
        where = (
            f"the hop from {names.label(nodes[slowest.hop_rank])} to {names.label(nodes[after])}"
        )
    return (
        f"predicted {_milliseconds(predicted.decode_latency)} a token, "
        f"{predicted.tokens_per_second:.3g} tokens/s for one request, "
        f"{predicted.throughput_tokens_per_second:.3g} for many, bounded by {where}"
    )


def _milliseconds(duration: duration_pb2.Duration) -> str:
    return f"{duration.ToNanoseconds() / 1e6:.3g} ms"


def taken_placement(
    response: placement_service_pb2.PreviewPlacementsResponse,
    objective: placement_pb2.Objective.ValueType = placement_pb2.OBJECTIVE_UNSPECIFIED,
) -> placement_pb2.Placement | None:
    """Return what `up` takes of previews that were asked for with this objective: the best at it,
    or else the first that can be placed; None when nothing can."""
    placements = [p.placement for p in response.previews if p.HasField("placement")]
    return min(placements, key=lambda p: _figure(p, objective), default=None)


def _figure(
    placement: placement_pb2.Placement, objective: placement_pb2.Objective.ValueType
) -> float:
    """Return what an objective wants to be small; the same for all without one."""
    predicted = placement.predicted_speed
    if objective == placement_pb2.OBJECTIVE_DECODE_LATENCY:
        return predicted.decode_latency.ToNanoseconds()
    if objective == placement_pb2.OBJECTIVE_THROUGHPUT:
        return -predicted.throughput_tokens_per_second
    return 0.0


def _way(preview: placement_service_pb2.Preview) -> str:
    """Return what sets a preview apart from the usual pipeline on the MLX ring."""
    words = []
    if preview.sharding == common_pb2.SHARDING_TENSOR:
        words.append("tensor")
    if preview.ring_backend == common_pb2.RING_BACKEND_JACCL:
        words.append("JACCL")
    return "".join(f", {word}" for word in words)


def previews(
    response: placement_service_pb2.PreviewPlacementsResponse,
    objective: placement_pb2.Objective.ValueType = placement_pb2.OBJECTIVE_UNSPECIFIED,
    *,
    hosts: bool = False,
) -> RenderableType:
    """Return a paragraph for each ring size: the placement, or the refusal in words.

    With the same objective `up` takes the one that is marked. `hosts` adds the host lists.
    """
    parts: list[RenderableType] = []
    usual = [
        number
        for number, preview in enumerate(response.previews)
        if preview.HasField("placement") and not _way(preview)
    ]
    taken = min(
        usual, key=lambda n: _figure(response.previews[n].placement, objective), default=None
    )
    for number, preview in enumerate(response.previews):
        way = _way(preview)
        heading = Text(count(preview.node_count, "node") + way, style="bold")
        if preview.WhichOneof("outcome") == "placement":
            placement = preview.placement
            if number == taken:
                heading.append(" (taken by up and run)", style="green")
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
