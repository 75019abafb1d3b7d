"""Refusals: the documented reason, and figures a program can read.

Metadata is bounded, since it travels in HTTP/2 trailers of a few kilobytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from services.common.errors import Reason, ShardringError, invalid_field
from services.common.ranges import ranges
from services.placement.domain.budget import Budget
from services.placement.domain.candidates import Candidates
from services.placement.domain.census import removed_sets
from services.placement.domain.cluster import Cluster, RingBackend
from services.placement.domain.demand import sizes_allowed
from services.placement.domain.model import Model, Sharding
from services.placement.domain.request import PlacementRequest
from services.placement.domain.rings import Ring
from services.placement.domain.search import Found, RingSearch, roomiest_ring
from services.placement.domain.shards import proportional, stages_of

# Most sizes, pairs and nodes that one refusal gives figures of.
MOST_SIZES = 8
MOST_LISTED = 8
# Most nodes and pairs that one message names.
MOST_NAMED = 4
GATHERING_RETRY_SECONDS = 2.0
PROBING_RETRY_SECONDS = 1.0

# Longest text that metadata carries.
_MOST_TEXT = 300

# What may come right once every node has reported after topology's restart.
_TRANSIENT = {
    Reason.NO_NODES,
    Reason.REQUIRED_NODE_UNKNOWN,
    Reason.NOT_ENOUGH_NODES,
    Reason.NOT_ENOUGH_MEMORY,
    Reason.NO_RING,
    Reason.CUT_NOT_ALLOWED,
    Reason.BACKEND_UNSUPPORTED,
    Reason.NOT_CALIBRATED,
}
# What more links may bring right.
_FOR_WANT_OF_LINKS = {Reason.NO_RING, Reason.NOT_ENOUGH_MEMORY}


@dataclass(frozen=True)
class Asked:
    """A question in full, for explaining why it has no answer."""

    candidates: Candidates
    model: Model
    request: PlacementRequest


def check_cluster(cluster: Cluster, request: PlacementRequest) -> None:
    """Raise NO_NODES or REQUIRED_NODE_UNKNOWN where no ring size can help."""
    if not cluster.nodes:
        raise ShardringError(
            Reason.NO_NODES,
            "No node is known to topology. Start one with `shardring node` on each machine.",
        )
    unknown = sorted(request.required - set(cluster.nodes))
    if unknown:
        raise ShardringError(
            Reason.REQUIRED_NODE_UNKNOWN,
            f"Required but not in the topology: {', '.join(unknown[:MOST_NAMED])}. "
            "Are these nodes running, and their ids right?",
            metadata={"node_ids": ",".join(unknown[:MOST_LISTED]), "node_count": len(unknown)},
        )


def check_layer_counts(model: Model, request: PlacementRequest) -> None:
    """Raise INVALID_FIELD where an explicit split asks for more layers than there are."""
    asked = sum(request.layer_counts.values())
    if asked > model.layer_count:
        raise invalid_field(
            "constraints.layer_counts",
            f"{asked} layers in sum",
            f"at most the {model.layer_count} layers of {model.model_id}",
        )


def for_now(cluster: Cluster, refusal: ShardringError) -> ShardringError:
    """Return the refusal; "try again" instead, where that may help: while topology is gathering,
    and while nodes that came just now still verify their links."""
    if cluster.gathering and refusal.reason in _TRANSIENT:
        return _while_gathering(refusal)
    if cluster.probing and refusal.reason in _FOR_WANT_OF_LINKS:
        return _while_probing(cluster, refusal)
    return refusal


def _while_probing(cluster: Cluster, refusal: ShardringError) -> ShardringError:
    names = [cluster.nodes[node_id].name for node_id in cluster.probing[:MOST_NAMED]]
    return ShardringError(
        Reason.LINKS_NOT_VERIFIED,
        f"{', '.join(names)} came just now, and not every link is verified yet; try again in a "
        f"moment. As far as is known now: {refusal.message}",
        metadata={
            **refusal.metadata,
            "refusal": refusal.reason,
            "probing_node_ids": ",".join(cluster.probing[:MOST_LISTED]),
        },
        retry_delay_seconds=PROBING_RETRY_SECONDS,
    )


def _while_gathering(refusal: ShardringError) -> ShardringError:
    return ShardringError(
        Reason.TOPOLOGY_GATHERING,
        "The topology service has just started and is still gathering reports; try again in a "
        f"moment. As far as it knows now: {refusal.message}",
        metadata={**refusal.metadata, "refusal": refusal.reason},
        retry_delay_seconds=GATHERING_RETRY_SECONDS,
    )


def count_refusal(asked: Asked, node_count: int) -> ShardringError | None:
    """Return why no ring of `node_count` or more nodes can be thought of at all, if so."""
    candidates, model = asked.candidates, asked.model
    usable = candidates.node_ids
    without_backend = candidates.without_backend
    required_idle = sorted(candidates.required & set(without_backend))
    if required_idle or (not usable and without_backend):
        return _idle_refusal(candidates, required_idle or list(without_backend))
    if len(usable) < node_count:
        return ShardringError(
            Reason.NOT_ENOUGH_NODES,
            f"{node_count} {'node is' if node_count == 1 else 'nodes are'} asked for, "
            f"{len(usable)} of {len(candidates.cluster.nodes)} can be used. "
            "Add nodes, exclude fewer, or ask for fewer.",
            metadata={
                "min_node_count": node_count,
                "node_count": len(usable),
                "excluded_count": len(asked.request.excluded & set(candidates.cluster.nodes)),
                "without_backend": ",".join(without_backend[:MOST_LISTED]),
            },
        )
    if model.sharding is Sharding.TENSOR:
        return _tensor_refusal(asked, node_count)
    if node_count > model.layer_count:
        return ShardringError(
            Reason.TOO_FEW_LAYERS,
            f"{model.model_id} has {model.layer_count} layers, too few for {node_count} nodes "
            "with at least one each. Ask for fewer nodes.",
            metadata={"layer_count": model.layer_count, "min_node_count": node_count},
        )
    if node_count > model.most_stages:
        return _cut_refusal(asked, f"{node_count} nodes are asked for", node_count)
    return None


def _idle_refusal(candidates: Candidates, idle: Sequence[str]) -> ShardringError:
    names = _names(candidates, idle)
    if candidates.ring_backend is RingBackend.JACCL:
        wanted = "METAL"
        message = f"{names} cannot take part in JACCL, which needs Metal: use the MLX ring there."
    else:
        wanted = "METAL,CPU,CUDA"
        message = (
            f"{names} cannot compute: no MLX backend (METAL, CPU, CUDA) there. "
            "Install shardring[runner] on these nodes."
        )
    return ShardringError(
        Reason.BACKEND_UNSUPPORTED,
        message,
        metadata={"backend": wanted, "node_ids": ",".join(idle[:MOST_LISTED])},
    )


def _tensor_refusal(asked: Asked, node_count: int) -> ShardringError | None:
    """Return why tensor sharding works for no ring of `node_count` or more of the nodes, if so."""
    usable = len(asked.candidates.node_ids)
    if sizes_allowed(asked.model, range(node_count, usable + 1)):
        return None
    return _cannot_be_cut(asked, node_count)


def size_refusal(asked: Asked, size: int) -> ShardringError | None:
    """Return why the model cannot be cut for a ring of just this size, if so."""
    return None if asked.model.can_be_cut_for(size) else _cannot_be_cut(asked, size)


def _cannot_be_cut(asked: Asked, node_count: int) -> ShardringError:
    model = asked.model
    sizes = sizes_allowed(model, range(1, len(asked.candidates.node_ids) + 1))
    why = "its hidden size and its key-value heads must divide by the number of nodes"
    if not model.tensor_supported:
        why = "the engine cannot split its layers"
    return ShardringError(
        Reason.SHARDING_UNSUPPORTED,
        f"{model.model_id} cannot be tensor-sharded over {node_count} nodes: {why}. "
        f"It works on {', '.join(map(str, sizes[:MOST_SIZES]))}. Ask for as many, or for pipeline "
        "sharding.",
        metadata={
            "sharding": "TENSOR",
            "min_node_count": node_count,
            "accepted_sizes": ",".join(map(str, sizes[:MOST_LISTED])),
            "hidden_size": model.hidden_size,
            "key_value_head_count": model.key_value_head_count,
        },
    )


def below_minimum(request: PlacementRequest, size: int) -> ShardringError | None:
    """Return why a ring of this size has fewer nodes than the request's constraints allow."""
    least = max(request.min_node_count, len(request.required))
    if size >= least:
        return None
    return ShardringError(
        Reason.NOT_ENOUGH_NODES,
        f"A ring of {size} is smaller than the {least} nodes asked for.",
        metadata={"min_node_count": least, "node_count": size},
    )


def cut_refusal(asked: Asked, sizes: range, budget: Budget) -> ShardringError | None:
    """Return why no ring of any of these sizes passed, if the reason is where the model may be cut:
    if one of them would do for it, were it cut freely."""
    if asked.model.cuts is None or asked.model.sharding is Sharding.TENSOR:
        return None
    free = replace(asked.model, cuts=None)
    search = RingSearch(asked.candidates, free)
    if not any(search.of_size(size, budget).ring for size in sizes_allowed(free, sizes)):
        return None
    fault = "no ring has room for it so"
    if asked.request.layer_counts:
        fault = "no ring has room for it so, or the layer counts asked for are others"
    return _cut_refusal(asked, fault, sizes[0])


def _cut_refusal(asked: Asked, fault: str, min_node_count: int) -> ShardringError:
    model = asked.model
    start, end = max(
        pairwise((0, *model.stage_ends(1, model.layer_count))),
        key=lambda stage: model.stage_bytes(*stage),
    )
    needed = model.stage_bytes(start, end)
    most = max((asked.candidates.memory_bytes[n] for n in asked.candidates.node_ids), default=0)
    allowed = ranges(model.cuts or ())
    where = f"only before layers {allowed}" if allowed else "nowhere"
    return ShardringError(
        Reason.CUT_NOT_ALLOWED,
        f"{model.model_id} may be cut into stages {where} ({model.cut_obstacle}), into "
        f"{model.most_stages} at the most. Its largest part, layers {start} to {end - 1}, takes "
        f"{_gb(needed)}; the roomiest node has {_gb(most)}; {fault}. Ask for fewer nodes, for "
        "other layer counts, or for tensor sharding; or free memory on one node.",
        metadata={
            "model_id": model.model_id,
            "allowed_cuts": allowed[:_MOST_TEXT],
            "obstacle": model.cut_obstacle[:_MOST_TEXT],
            "most_stage_count": model.most_stages,
            "min_node_count": min_node_count,
            "largest_part": f"{start}-{end - 1}",
            "needed_bytes": needed,
            "available_bytes": most,
        },
    )


def ring_refusal(
    asked: Asked, sizes: Sequence[int], proven: bool, budget: Budget
) -> ShardringError:
    """Explain why no ring of any of these sizes (at least one) passed.

    `proven` False: the search ran out of steps, so a ring may exist that was not found.
    """
    shown = sorted({*sizes[: MOST_SIZES // 2], *sizes[-MOST_SIZES // 2 :]})
    metadata: dict[str, object] = {}
    closest: Found | None = None
    for size in shown:
        roomiest = roomiest_ring(asked.candidates, size, budget)
        proven = proven and roomiest.proven
        metadata[f"rejected.{size}"] = "memory" if roomiest.ring else "not_linked"
        removed = removed_sets(asked.candidates, asked.model, asked.request, size, budget)
        for rule, count in (removed or {}).items():
            metadata[f"rejected.{size}.{rule}"] = count
        if roomiest.ring and (
            closest is None or _memory(asked, roomiest.ring) > _memory(asked, closest.ring)
        ):
            closest = roomiest
    if not proven:
        metadata["search_complete"] = "false"
    one_way = asked.candidates.one_way[:MOST_LISTED]
    if one_way:
        metadata["one_way_pairs"] = ",".join(f"{a}->{b}" for a, b in one_way)
        metadata["missing_links"] = ",".join(f"{b}->{a}" for a, b in one_way)
    hint = _one_way_hint(asked.candidates, one_way)
    unsure = "" if proven else " (The search was cut short; there may be a ring it did not find.)"
    if closest is None or closest.ring is None:
        span = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
        return ShardringError(
            Reason.NO_RING,
            f"No ring of {span} nodes is linked in both directions.{hint}{unsure}",
            metadata={"min_node_count": sizes[0], **metadata},
        )
    figures, message = _shortfall(asked, closest.ring)
    return ShardringError(
        Reason.NOT_ENOUGH_MEMORY, f"{message}{hint}{unsure}", metadata={**figures, **metadata}
    )


def _shortfall(asked: Asked, ring: Ring) -> tuple[dict[str, object], str]:
    """Return needed and available bytes of a ring that cannot hold the model, as data and text."""
    model, memory = asked.model, asked.candidates.memory_bytes
    available = [memory[node_id] for node_id in ring]
    if model.sharding is Sharding.TENSOR and len(ring) > 1:
        parts = [model.tensor_share_bytes(len(ring))] * len(ring)
        needed = sum(parts)
    else:
        # A node without memory is shown with what its one layer would need.
        counts = proportional(model.layer_count, [max(1, have) for have in available])
        parts = [model.stage_bytes(start, end) for start, end in stages_of(counts)]
        needed = model.needed_bytes
    figures: dict[str, object] = {
        "needed_bytes": needed,
        "available_bytes": sum(available),
        "shortfall_bytes": max(0, needed - sum(available)),
        "node_count": len(ring),
    }
    by_node = list(zip(ring, parts, available, strict=True))[:MOST_LISTED]
    for node_id, needs, have in by_node:
        figures[f"node.{node_id}.needed_bytes"] = needs
        figures[f"node.{node_id}.available_bytes"] = have
        figures[f"node.{node_id}.short_bytes"] = max(0, needs - have)
    names = {node.node_id: node.name for node in asked.candidates.cluster.nodes.values()}
    shares = [
        f"{names[n]} needs {_gb(needs)} and has {_gb(have)}"
        + (f", {_gb(needs - have)} short" if needs > have else "")
        for n, needs, have in by_node
    ]
    listed = "; ".join(shares[:MOST_NAMED]) + ("; ..." if len(ring) > MOST_NAMED else "")
    if sum(available) < needed:
        what = f"needs {_gb(needed)}; the ring that comes closest has {_gb(sum(available))}"
    else:
        what = "fits the ring that comes closest in sum, but cannot be cut so that each node fits"
    return figures, (
        f"{model.model_id} {what}: {listed}. Close programs on what is short, raise its share "
        "(--memory-gb, --headroom-gb of its node), add a node, or choose a smaller model."
    )


def _memory(asked: Asked, ring: Ring | None) -> int:
    return sum(asked.candidates.memory_bytes[node_id] for node_id in ring or ())


def _one_way_hint(candidates: Candidates, one_way: Sequence[tuple[str, str]]) -> str:
    if not one_way:
        return ""
    nodes = candidates.cluster.nodes
    missing = "; ".join(
        f"{nodes[sink].name} does not reach {nodes[source].name}"
        for source, sink in one_way[:MOST_NAMED]
    )
    return f" Linked one way only: {missing}."


def _names(candidates: Candidates, node_ids: Sequence[str]) -> str:
    return ", ".join(candidates.cluster.nodes[node_id].name for node_id in node_ids[:MOST_NAMED])


def _gb(count: int) -> str:
    """Return bytes for people; small figures in bytes, so that a shortfall never reads 0.0 GB."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"
