"""Names of nodes, models and instances as people type and read them."""

import re
import secrets
from collections import Counter
from collections.abc import Iterable, Sequence

from services.common.errors import Reason, ShardringError, invalid_field
from shardring.placement.v1 import placement_pb2
from shardring.topology.v1 import topology_pb2

SHORT_ID_LENGTH = 8
_MAX_INSTANCE_ID_LENGTH = 64


class NodeNames:
    """Gives each node a label: its name, with a short id where two share one."""

    def __init__(self, nodes: Iterable[tuple[str, str]]) -> None:
        """`nodes`: pairs of id and name; a later pair replaces an earlier one of the same id."""
        names = dict(nodes)
        self._short = short_ids(names)
        uses = Counter(names.values())
        self._labels = {
            node_id: f"{name} ({self._short[node_id]})" if name and uses[name] > 1 else name
            for node_id, name in names.items()
        }

    def label(self, node_id: str) -> str:
        """Return a node's label; of a node not known here, its short id."""
        return self._labels.get(node_id) or self.short_id(node_id)

    def short_id(self, node_id: str) -> str:
        """Return as much of an id as tells it from the others."""
        return self._short.get(node_id, node_id[:SHORT_ID_LENGTH])


def names_of_nodes(nodes: Iterable[topology_pb2.Node]) -> NodeNames:
    """Return the names of the topology's nodes."""
    return NodeNames((node.node_id, node.name) for node in nodes)


def names_of_ranks(placement: placement_pb2.Placement) -> NodeNames:
    """Return the names of a placement's nodes."""
    return NodeNames((rank.node_id, rank.node_name) for rank in placement.ranks)


def short_ids(ids: Iterable[str]) -> dict[str, str]:
    """Return each id cut to one length, 8 or as much longer as keeps them apart."""
    known = set(ids)
    length = SHORT_ID_LENGTH
    while len({node_id[:length] for node_id in known}) < len(known):
        length += 1
    return {node_id: node_id[:length] for node_id in known}


def resolve_node(nodes: Sequence[topology_pb2.Node], text: str) -> topology_pb2.Node:
    """Return the node meant by an id, a name, or the beginning of an id.

    Raises NODE_NOT_FOUND listing the known nodes, or INVALID_FIELD when several are meant.
    """
    for node in nodes:
        if node.node_id == text:
            return node
    meant = [node for node in nodes if node.name == text]
    if not meant and text:
        meant = [node for node in nodes if node.node_id.startswith(text)]
    if len(meant) == 1:
        return meant[0]
    if meant:
        raise invalid_field(
            "node", text, f"one node's name or id, but this could mean {_listed(meant)}"
        )
    known = f"Known nodes: {_listed(nodes)}." if nodes else "No nodes are known."
    raise ShardringError(
        Reason.NODE_NOT_FOUND, f"No node is called {text!r}. {known}", metadata={"node": text}
    )


def resolve_nodes(
    nodes: Sequence[topology_pb2.Node], texts: Sequence[str]
) -> list[topology_pb2.Node]:
    """Return the nodes meant, each once, in the order given. Errors as `resolve_node`."""
    meant = {node.node_id: node for node in (resolve_node(nodes, text) for text in texts)}
    return list(meant.values())


def new_instance_id(model_id: str) -> str:
    """Return an id no instance has: the model's name and four random hexadecimal digits."""
    ending = f"-{secrets.token_hex(2)}"
    name = re.sub(r"[^a-z0-9]+", "-", model_id.rpartition("/")[2].lower()).strip("-")
    return (name[: _MAX_INSTANCE_ID_LENGTH - len(ending)].strip("-") or "instance") + ending


def _listed(nodes: Sequence[topology_pb2.Node]) -> str:
    short = short_ids(node.node_id for node in nodes)
    by_name = sorted(nodes, key=lambda node: (node.name, node.node_id))
    return ", ".join(f"{node.name} ({short[node.node_id]})" for node in by_name)
