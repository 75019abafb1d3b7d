"""The worked examples, against the domain."""

import json
from collections import Counter
from pathlib import Path

import pytest

from services.common.errors import Reason, ShardringError
from services.placement.domain.candidates import Download, DownloadState
from services.placement.domain.cluster import Backend, Cluster, Link, LinkKind, Node, cluster_of
from services.placement.domain.decide import place
from services.placement.domain.model import Model
from services.placement.rpc.conversion import placement_to_proto, request_from_proto
from shardring.placement.v1 import placement_pb2
from tests.conformance.placement_case import Case

CASES = [
    Case(raw)
    for raw in json.loads((Path(__file__).parents[2] / "vectors" / "placement.json").read_text())
]

STATES = {
    "completed": DownloadState.COMPLETED,
    "ongoing": DownloadState.UNFINISHED,
    "pending": DownloadState.UNFINISHED,
    "failed": DownloadState.FAILED,
}


def cluster_of_case(case: Case) -> Cluster:
    raw = case.raw
    kinds = {
        (node["id"], interface["ip_address"]): LinkKind[interface["kind"].upper()]
        for node in raw["nodes"]
        for interface in node["interfaces"]
    }
    nodes = [
        Node(node["id"], node["id"], case.memory_bytes(node), (Backend.METAL,))
        for node in raw["nodes"]
    ]
    links = [
        Link(
            link["source"],
            link["sink"],
            link["sink_ip"],
            kinds.get((link["sink"], link["sink_ip"]), LinkKind.UNKNOWN),
        )
        for link in raw["links"]
    ]
    return cluster_of(nodes, links)


def model_of_case(case: Case) -> Model:
    model, layers = case.raw["model"], (case.layer_bytes,) * case.layer_count
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


def outcome_of(case: Case) -> placement_pb2.Placement | Reason:
    downloads = {
        node_id: Download(STATES[d["state"]], d.get("downloaded_bytes", 0), d.get("total_bytes", 0))
        for node_id, d in case.raw["downloads"].items()
    }
    request = request_from_proto(case.request())
    try:
        placement = place(cluster_of_case(case), model_of_case(case), downloads, request)
    except ShardringError as refusal:
        return refusal.reason
    return placement_to_proto(placement)


def test_which_cases_are_covered() -> None:
    assert len(CASES) == 400
    kinds = Counter((case.raw["request"]["sharding"], case.expected["outcome"]) for case in CASES)
    assert kinds == {
        ("pipeline", "placed"): 155,
        ("pipeline", "infeasible"): 135,
        ("pipeline", "any_valid"): 10,
        ("tensor", "placed"): 41,
        ("tensor", "infeasible"): 53,
        ("tensor", "any_valid"): 6,
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(case: Case) -> None:
    assert case.differences(outcome_of(case)) == []
