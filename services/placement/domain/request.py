"""What a client asks for, checked."""

import re
from dataclasses import dataclass

from services.common.errors import invalid_field

# More nodes than any ring will have; keeps one request from asking for absurd work.
MAX_NODE_COUNT = 1024
MAX_ID_LENGTH = 256

# The hub's names: "name" or "organisation/name", each part as the hub allows it.
_MODEL_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,95}(/[A-Za-z0-9_][A-Za-z0-9._-]{0,95})?")


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


def request_of(
    *,
    model_id: str,
    revision: str = "",
    min_node_count: int = 0,
    required: tuple[str, ...] = (),
    excluded: tuple[str, ...] = (),
    request_id: str = "",
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
    both = sorted(set(required) & set(excluded))
    if both:
        raise invalid_field(
            "constraints.excluded_node_ids", ",".join(both), "no node that is also required"
        )
    if len(request_id) > MAX_ID_LENGTH:
        raise invalid_field("request_id", request_id, f"at most {MAX_ID_LENGTH} characters")
    return PlacementRequest(
        model_id=model_id,
        revision=revision or "main",
        min_node_count=max(1, min_node_count),
        required=frozenset(required),
        excluded=frozenset(excluded),
        request_id=request_id,
    )


def _check_node_ids(field: str, node_ids: tuple[str, ...]) -> None:
    if len(node_ids) > MAX_NODE_COUNT:
        raise invalid_field(field, f"{len(node_ids)} ids", f"at most {MAX_NODE_COUNT} ids")
    for node_id in node_ids:
        if not node_id or len(node_id) > MAX_ID_LENGTH:
            raise invalid_field(field, node_id, "node ids, none of them empty")
