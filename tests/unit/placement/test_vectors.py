"""The worked examples, against the domain.

Bytes are scaled by the number of layers, so that a layer's share of the model is a whole number
and no rounding blurs what fits.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from services.common.errors import Reason, ShardringError
from services.placement.domain.candidates import Download, DownloadState
from services.placement.domain.cluster import Backend, Cluster, Link, LinkKind, Node, cluster_of
from services.placement.domain.decide import place
from services.placement.domain.hosts import NOT_A_NEIGHBOUR
from services.placement.domain.model import Model, Sharding
from services.placement.domain.placement import Placement
from services.placement.domain.request import request_of

Case = dict[str, Any]

ALL_CASES: list[Case] = json.loads(
    (Path(__file__).parents[2] / "vectors" / "placement.json").read_text()
)

STATES = {
    "completed": DownloadState.COMPLETED,
    "ongoing": DownloadState.UNFINISHED,
    "pending": DownloadState.UNFINISHED,
    "failed": DownloadState.FAILED,
}
REFUSALS = {
    Reason.NO_RING,
    Reason.NOT_ENOUGH_MEMORY,
    Reason.NOT_ENOUGH_NODES,
    Reason.TOO_FEW_LAYERS,
    Reason.SHARDING_UNSUPPORTED,
    Reason.REQUIRED_NODE_UNKNOWN,
    Reason.NO_NODES,
}


def cluster_of_case(case: Case) -> Cluster:
    scale = case["model"]["n_layers"]
    kinds = {
        (node["id"], interface["ip_address"]): LinkKind[interface["kind"].upper()]
        for node in case["nodes"]
        for interface in node["interfaces"]
    }
    nodes = [
        Node(node["id"], node["id"], node["ram_available_bytes"] * scale, (Backend.METAL,))
        for node in case["nodes"]
    ]
    links = [
        Link(
            link["source"],
            link["sink"],
            link["sink_ip"],
            kinds.get((link["sink"], link["sink_ip"]), LinkKind.UNKNOWN),
        )
        for link in case["links"]
    ]
    return cluster_of(nodes, links)


def model_of_case(case: Case) -> Model:
    model = case["model"]
    layers = (model["storage_size_bytes"],) * model["n_layers"]
    return Model(
        model["model_id"],
        "c",
        "llama",
        True,
        layers,
        0,
        0,
        sum(layers),
        hidden_size=model["hidden_size"],
        key_value_head_count=model["num_key_value_heads"],
        tensor_supported=model["supports_tensor"],
    )


def place_case(case: Case) -> Placement:
    downloads = {
        node_id: Download(STATES[d["state"]], d.get("downloaded_bytes", 0), d.get("total_bytes", 0))
        for node_id, d in case["downloads"].items()
    }
    request = request_of(
        model_id=case["model"]["model_id"],
        min_node_count=case["request"]["min_nodes"],
        required=tuple(case["request"]["required_node_ids"]),
        sharding=Sharding(case["request"]["sharding"].upper()),
    )
    return place(cluster_of_case(case), model_of_case(case), downloads, request)


def place_or_refuse(case: Case) -> Placement | ShardringError:
    try:
        return place_case(case)
    except ShardringError as refusal:
        return refusal


def check_valid(case: Case, placement: Placement) -> None:
    """What holds for any placement, whatever was expected."""
    ranks, model = placement.ranks, model_of_case(case)
    links = {(link["source"], link["sink"], link["sink_ip"]) for link in case["links"]}
    assert len(ranks) >= case["request"]["min_nodes"]
    assert {rank.node_id for rank in ranks} >= set(case["request"]["required_node_ids"])
    if placement.sharding is Sharding.TENSOR:
        assert {(rank.start, rank.end) for rank in ranks} == {(0, model.layer_count)}
        assert sum(rank.weight_bytes for rank in ranks) >= model.weight_bytes
    else:
        assert [rank.start for rank in ranks] == [0, *(rank.end for rank in ranks[:-1])]
        assert ranks[-1].end == model.layer_count
    for rank in ranks:
        assert rank.start < rank.end
        assert rank.weight_bytes <= rank.memory_available_bytes
    if len(ranks) == 1:
        assert ranks[0].hosts == ()
        return
    for rank in ranks:
        assert len(rank.hosts) == len(ranks)
        for other in ranks:
            ip, port = rank.hosts[other.rank].rsplit(":", 1)
            if other is rank:
                assert (ip, port) == ("0.0.0.0", ranks[0].hosts[0].rsplit(":", 1)[1])
            elif (other.rank - rank.rank) % len(ranks) in (1, len(ranks) - 1):
                assert (rank.node_id, other.node_id, ip) in links
                assert (other.node_id, rank.node_id) in {link[:2] for link in links}
            else:
                assert rank.hosts[other.rank] == str(NOT_A_NEIGHBOUR)


def test_which_cases_are_covered() -> None:
    assert len(ALL_CASES) == 400
    kinds = Counter(
        (case["request"]["sharding"], case["expected"]["outcome"]) for case in ALL_CASES
    )
    assert kinds == {
        ("pipeline", "placed"): 155,
        ("pipeline", "infeasible"): 135,
        ("pipeline", "any_valid"): 10,
        ("tensor", "placed"): 41,
        ("tensor", "infeasible"): 53,
        ("tensor", "any_valid"): 6,
    }


@pytest.mark.parametrize("case", ALL_CASES, ids=lambda case: str(case["case"]))
def test_case(case: Case) -> None:
    expected = case["expected"]
    outcome = place_or_refuse(case)
    if isinstance(outcome, ShardringError):
        assert expected["outcome"] != "placed", outcome
        assert outcome.reason in REFUSALS
        return
    placement = outcome
    assert expected["outcome"] != "infeasible"
    check_valid(case, placement)
    if expected["outcome"] == "any_valid":
        return
    placed = sorted(rank.node_id for rank in placement.ranks)
    assert placed in [sorted(nodes) for nodes in expected["node_sets"]]
    assert len(placed) == expected["world_size"]
    assert placement.sharding == expected["sharding"].upper()
    if "layer_count_by_node" in expected:
        counts = {rank.node_id: rank.end - rank.start for rank in placement.ranks}
        assert counts == expected["layer_count_by_node"]
    if "ip_from_to" in expected:
        for rank in placement.ranks:
            for other, host in zip(placement.ranks, rank.hosts, strict=bool(rank.hosts)):
                ip = host.rsplit(":", 1)[0]
                if ip not in ("0.0.0.0", NOT_A_NEIGHBOUR.host):
                    assert ip == expected["ip_from_to"][rank.node_id][other.node_id]
