"""What a client asks for, checked."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from services.common.errors import invalid_field
from services.placement.domain.cluster import RingBackend
from services.placement.domain.model import Sharding
from services.placement.domain.shards import ANY_LAYER_COUNT

# More nodes than any ring will have; keeps one request from asking for absurd work.
MAX_NODE_COUNT = 1024
MAX_ID_LENGTH = 256
MAX_LAYER_COUNT = 100_000
MAX_TOKEN_COUNT = 2**31 - 1
MAX_CONCURRENCY = 65_536
MAX_MEMORY_BYTES = 2**50

# The one way to run a model whose speed is predicted.
PREDICTED_WAY = (Sharding.PIPELINE, RingBackend.MLX_RING)

# The hub's names: "name" or "organisation/name", each part as the hub allows it.
_MODEL_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,95}(/[A-Za-z0-9_][A-Za-z0-9._-]{0,95})?")


class Objective(StrEnum):
    """What a placement is to be best at: the rules' order of choice, or a predicted figure."""

    DEFAULT = "DEFAULT"
    DECODE_LATENCY = "DECODE_LATENCY"
    THROUGHPUT = "THROUGHPUT"


@dataclass(frozen=True)
class PlacementRequest:
    """A checked request; build it with `request_of`."""

    model_id: str
    revision: str
    # At least 1.
    min_node_count: int
    required: frozenset[str]
    excluded: frozenset[str]
    # Chooses the ring's ports.
    request_id: str
    sharding: Sharding = Sharding.PIPELINE
    ring_backend: RingBackend = RingBackend.MLX_RING
    # Tokens that the key-value caches must have room for, of all requests at once.
    cache_token_count: int = 0
    # Memory to leave free on each node, beside what the node itself leaves free.
    headroom_bytes: int = 0
    # Most layers, and the exact number of layers, of a node. Nodes with an exact number are
    # required.
    max_layer_counts: Mapping[str, int] = field(default_factory=dict)
    layer_counts: Mapping[str, int] = field(default_factory=dict)
    objective: Objective = Objective.DEFAULT

    def layer_bounds(self, node_id: str) -> tuple[int, int]:
        """Return how many layers a node must hold at least and may hold at most."""
        exact = self.layer_counts.get(node_id)
        if exact is not None:
            return exact, exact
        return 1, self.max_layer_counts.get(node_id, ANY_LAYER_COUNT)


def request_of(
    *,
    model_id: str,
    revision: str = "",
    min_node_count: int = 0,
    required: tuple[str, ...] = (),
    excluded: tuple[str, ...] = (),
    request_id: str = "",
    sharding: Sharding = Sharding.PIPELINE,
    ring_backend: RingBackend = RingBackend.MLX_RING,
    context_token_count: int = 0,
    concurrent_request_count: int = 0,
    headroom_bytes: int = 0,
    max_layer_counts: Mapping[str, int] | None = None,
    layer_counts: Mapping[str, int] | None = None,
    objective: Objective = Objective.DEFAULT,
) -> PlacementRequest:
    """Return the checked request, defaults filled in. Raises INVALID_FIELD naming the field."""
    if not _MODEL_ID.fullmatch(model_id) or ".." in model_id or "--" in model_id:
        raise invalid_field("model_id", model_id, 'a hub name like "organisation/name"')
    if len(revision) > MAX_ID_LENGTH or not revision.isprintable():
        raise invalid_field("revision", revision, "a branch, tag or commit")
    if not 0 <= min_node_count <= MAX_NODE_COUNT:
        raise invalid_field("constraints.min_node_count", min_node_count, f"0 to {MAX_NODE_COUNT}")
    _check_node_ids("constraints.required_node_ids", required)
    _check_node_ids("constraints.excluded_node_ids", excluded)
    most, exact = dict(max_layer_counts or {}), dict(layer_counts or {})
    _check_layers("constraints.max_layer_counts", most, excluded, sharding)
    _check_layers("constraints.layer_counts", exact, excluded, sharding)
    for node_id in sorted(most.keys() & exact.keys()):
        if exact[node_id] > most[node_id]:
            raise invalid_field(
                "constraints.layer_counts", exact[node_id], f"at most {most[node_id]} on {node_id}"
            )
    _check_range("constraints.context_token_count", context_token_count, MAX_TOKEN_COUNT)
    _check_range("constraints.concurrent_request_count", concurrent_request_count, MAX_CONCURRENCY)
    _check_range("constraints.headroom_bytes", headroom_bytes, MAX_MEMORY_BYTES)
    both = sorted(set(required) & set(excluded))
    if both:
        raise invalid_field(
            "constraints.excluded_node_ids", ",".join(both), "no node that is also required"
        )
    if objective is not Objective.DEFAULT and (sharding, ring_backend) != PREDICTED_WAY:
        raise invalid_field(
            "objective", objective, "none with tensor sharding or JACCL, which are not predicted"
        )
    if len(request_id) > MAX_ID_LENGTH:
        raise invalid_field("request_id", request_id, f"at most {MAX_ID_LENGTH} characters")
    return PlacementRequest(
        model_id=model_id,
        revision=revision or "main",
        min_node_count=max(1, min_node_count),
        required=frozenset(required) | exact.keys(),
        excluded=frozenset(excluded),
        request_id=request_id,
        sharding=sharding,
        ring_backend=ring_backend,
        cache_token_count=context_token_count * max(1, concurrent_request_count),
        headroom_bytes=headroom_bytes,
        max_layer_counts=most,
        layer_counts=exact,
        objective=objective,
    )


def _check_layers(
    name: str, counts: Mapping[str, int], excluded: tuple[str, ...], sharding: Sharding
) -> None:
    _check_node_ids(name, tuple(counts))
    if counts and sharding is Sharding.TENSOR:
        raise invalid_field(name, len(counts), "none with tensor sharding: every node holds all")
    for node_id, count in counts.items():
        if not 1 <= count <= MAX_LAYER_COUNT:
            raise invalid_field(name, f"{node_id}: {count}", f"1 to {MAX_LAYER_COUNT} layers")
    both = sorted(counts.keys() & set(excluded))
    if both:
        raise invalid_field(name, ",".join(both), "no node that is also excluded")


def _check_range(name: str, value: int, limit: int) -> None:
    if not 0 <= value <= limit:
        raise invalid_field(name, value, f"0 to {limit}")


def _check_node_ids(field: str, node_ids: tuple[str, ...]) -> None:
    if len(node_ids) > MAX_NODE_COUNT:
        raise invalid_field(field, f"{len(node_ids)} ids", f"at most {MAX_NODE_COUNT} ids")
    for node_id in node_ids:
        if not node_id or len(node_id) > MAX_ID_LENGTH:
            raise invalid_field(field, node_id, "node ids, none of them empty")
