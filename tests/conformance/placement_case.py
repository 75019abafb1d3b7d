"""A worked placement case: what it asks, and what is wrong with an answer to it.

The format is that of tests/vectors/placement.json. Bytes are scaled by the number of layers, so
that a layer's share of the model is a whole number and no rounding blurs what fits.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from services.common.errors import Reason
from shardring.common.v1 import common_pb2
from shardring.placement.v1 import placement_pb2, placement_service_pb2

NOT_A_NEIGHBOUR = "198.51.100.1"
REFUSALS = {
    Reason.NO_RING,
    Reason.NOT_ENOUGH_MEMORY,
    Reason.NOT_ENOUGH_NODES,
    Reason.TOO_FEW_LAYERS,
    Reason.SHARDING_UNSUPPORTED,
    Reason.REQUIRED_NODE_UNKNOWN,
    Reason.NO_NODES,
}


@dataclass(frozen=True)
class Case:
    """One case of such a file."""

    raw: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.raw["case"])

    @property
    def expected(self) -> dict[str, Any]:
        return dict(self.raw["expected"])

    @property
    def layer_count(self) -> int:
        return int(self.raw["model"]["n_layers"])

    @property
    def layer_bytes(self) -> int:
        return int(self.raw["model"]["storage_size_bytes"])

    def memory_bytes(self, node: dict[str, Any]) -> int:
        return int(node["ram_available_bytes"]) * self.layer_count

    def request(self) -> placement_service_pb2.PlaceRequest:
        """Return what is asked of placement."""
        asked = self.raw["request"]
        return placement_service_pb2.PlaceRequest(
            model_id=self.raw["model"]["model_id"],
            request_id=self.name,
            constraints=placement_service_pb2.PlacementConstraints(
                min_node_count=asked["min_nodes"], required_node_ids=asked["required_node_ids"]
            ),
            sharding=common_pb2.Sharding.Value(f"SHARDING_{asked['sharding'].upper()}"),
        )

    def differences(self, outcome: placement_pb2.Placement | Reason) -> list[str]:
        """Return what is wrong with an answer, in words; nothing when it is right."""
        wanted = self.expected["outcome"]
        if isinstance(outcome, Reason):
            if wanted == "placed":
                return [f"refused with {outcome}, expected a placement"]
            return [] if outcome in REFUSALS else [f"refused with {outcome}, which fits no case"]
        found = self._invalid(outcome)
        if wanted == "infeasible":
            found.append(f"placed on {_nodes(outcome)}, expected a refusal")
        if wanted == "placed":
            found += self._unexpected(outcome)
        return found

    def _invalid(self, placement: placement_pb2.Placement) -> list[str]:
        """Return what no placement may be, whatever was expected."""
        ranks, asked = placement.ranks, self.raw["request"]
        found = []
        if len(ranks) < asked["min_nodes"]:
            found.append(f"{len(ranks)} nodes, fewer than asked for")
        if not set(asked["required_node_ids"]) <= set(_nodes(placement)):
            found.append("a required node is missing")
        stages = [(rank.layers.start, rank.layers.end) for rank in ranks]
        if placement.sharding == common_pb2.SHARDING_TENSOR:
            if set(stages) != {(0, self.layer_count)}:
                found.append(f"stages {stages}, but every rank holds all layers")
        elif [0, *(end for _, end in stages[:-1])] != [start for start, _ in stages] or (
            stages[-1][1] != self.layer_count or any(start >= end for start, end in stages)
        ):
            found.append(f"stages {stages} are no cut of {self.layer_count} layers")
        memory = {node["id"]: self.memory_bytes(node) for node in self.raw["nodes"]}
        found += [
            f"{rank.node_id} holds {rank.weight_bytes} of {memory[rank.node_id]} bytes"
            for rank in ranks
            if rank.weight_bytes > memory[rank.node_id]
        ]
        if sum(rank.weight_bytes for rank in ranks) < self.layer_bytes * self.layer_count:
            found.append("the ranks together hold less than the model")
        return found + (self._wrong_hosts(placement) if len(ranks) > 1 else [])

    def _wrong_hosts(self, placement: placement_pb2.Placement) -> list[str]:
        ranks, count = placement.ranks, len(placement.ranks)
        links = {(link["source"], link["sink"], link["sink_ip"]) for link in self.raw["links"]}
        pairs = {link[:2] for link in links}
        found = []
        own_ports = [rank.hosts[rank.rank].rsplit(":", 1)[1] for rank in ranks]
        for rank in ranks:
            if len(rank.hosts) != count:
                found.append(f"rank {rank.rank} has {len(rank.hosts)} hosts")
                continue
            for other in ranks:
                ip, port = rank.hosts[other.rank].rsplit(":", 1)
                if other.rank == rank.rank:
                    right = ip == "0.0.0.0"
                elif (other.rank - rank.rank) % count in (1, count - 1):
                    right = (
                        (rank.node_id, other.node_id, ip) in links
                        and (other.node_id, rank.node_id) in pairs
                        and port == own_ports[other.rank]
                    )
                else:
                    right = (ip, port) == (NOT_A_NEIGHBOUR, "0")
                if not right:
                    found.append(f"rank {rank.rank} reaches {other.rank} at {ip}:{port}")
        return found

    def _unexpected(self, placement: placement_pb2.Placement) -> list[str]:
        expected, ranks = self.expected, placement.ranks
        found = []
        if sorted(_nodes(placement)) not in [sorted(nodes) for nodes in expected["node_sets"]]:
            found.append(f"placed on {_nodes(placement)}, expected {expected['node_sets']}")
            return found
        sharding = common_pb2.Sharding.Name(placement.sharding)
        if sharding != f"SHARDING_{expected['sharding'].upper()}":
            found.append(f"{sharding}, expected {expected['sharding']}")
        counts = {rank.node_id: rank.layers.end - rank.layers.start for rank in ranks}
        if counts != expected.get("layer_count_by_node", counts):
            found.append(f"layers {counts}, expected {expected['layer_count_by_node']}")
        addresses = expected.get("ip_from_to")
        if addresses and len(ranks) > 1:
            for here, there in (*pairwise([*ranks, ranks[0]]), *pairwise([ranks[0], *ranks[::-1]])):
                ip = here.hosts[there.rank].rsplit(":", 1)[0]
                if ip != addresses[here.node_id][there.node_id]:
                    found.append(
                        f"{here.node_id} reaches {there.node_id} at {ip}, expected "
                        f"{addresses[here.node_id][there.node_id]}"
                    )
        return found


def _nodes(placement: placement_pb2.Placement) -> list[str]:
    return [rank.node_id for rank in placement.ranks]
