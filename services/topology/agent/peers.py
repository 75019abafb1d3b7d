"""The other nodes as this node knows them from its watch. Plain data, no I/O."""

from services.topology.domain.model import Change, Node, Topology


class Peers:
    """Live nodes by id, kept up by the events of a watch.

    A topology service that has just started knows few nodes yet. While it is still gathering,
    nodes that were known before stay known, so that its restart loses no links.
    """

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        self._unconfirmed: set[str] = set()

    def apply(self, event: Topology | Change) -> bool:
        """Take what the watch says; return whether it may have changed the nodes."""
        unconfirmed = len(self._unconfirmed)
        if isinstance(event, Topology):
            listed = {node.node_id: node for node in event.nodes}
            self._unconfirmed = self.nodes.keys() - listed.keys()
            self.nodes |= listed
        else:
            for node in event.updated:
                self.nodes[node.node_id] = node
                self._unconfirmed.discard(node.node_id)
            for node_id in event.removed:
                self.nodes.pop(node_id, None)
                self._unconfirmed.discard(node_id)
        if not event.gathering:
            for node_id in self._unconfirmed:
                del self.nodes[node_id]
            self._unconfirmed.clear()
        if isinstance(event, Topology):
            return True
        return bool(event.updated or event.removed or len(self._unconfirmed) != unconfirmed)
