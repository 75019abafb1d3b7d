"""Names of nodes, models and instances."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.cli.names import (
    NodeNames,
    new_instance_id,
    resolve_node,
    resolve_nodes,
    short_ids,
)
from services.common.errors import Reason, ShardringError
from shardring.topology.v1 import topology_pb2

NODES = [
    topology_pb2.Node(node_id="aaaa1111bbbb", name="studio"),
    topology_pb2.Node(node_id="aaaa2222bbbb", name="mini"),
    topology_pb2.Node(node_id="cccc3333bbbb", name="mini"),
    topology_pb2.Node(node_id="dddd4444bbbb", name="aaaa2222bbbb"),
]


@pytest.mark.parametrize(
    ("text", "node_id"),
    [
        ("studio", "aaaa1111bbbb"),
        ("aaaa1111bbbb", "aaaa1111bbbb"),
        ("aaaa1", "aaaa1111bbbb"),
        ("c", "cccc3333bbbb"),
        # An id goes before a name.
        ("aaaa2222bbbb", "aaaa2222bbbb"),
    ],
)
def test_a_node_is_found(text: str, node_id: str) -> None:
    assert resolve_node(NODES, text).node_id == node_id


@pytest.mark.parametrize("text", ["", "x", "Studio", "aaaa1111bbbbb"])
def test_an_unknown_node_lists_the_known_ones(text: str) -> None:
    with pytest.raises(ShardringError) as caught:
        resolve_node(NODES[:2], text)
    assert caught.value.reason is Reason.NODE_NOT_FOUND
    assert "Known nodes: mini (aaaa2222), studio (aaaa1111)." in caught.value.message


@pytest.mark.parametrize("text", ["mini", "aaaa"])
def test_an_ambiguous_node_lists_what_it_could_be(text: str) -> None:
    with pytest.raises(ShardringError) as caught:
        resolve_node(NODES, text)
    assert caught.value.reason is Reason.INVALID_FIELD
    assert "mini (aaaa2222)" in caught.value.message
    assert "dddd4444" not in caught.value.message


def test_without_nodes_it_says_so() -> None:
    with pytest.raises(ShardringError, match="No nodes are known"):
        resolve_node([], "studio")


def test_a_node_given_twice_counts_once() -> None:
    assert [node.name for node in resolve_nodes(NODES, ["cccc", "studio", "cccc3"])] == [
        "mini",
        "studio",
    ]


def test_labels_tell_nodes_of_one_name_apart() -> None:
    names = NodeNames((node.node_id, node.name) for node in NODES)
    assert names.label("aaaa1111bbbb") == "studio"
    assert names.label("aaaa2222bbbb") == "mini (aaaa2222)"
    assert names.label("eeee5555bbbb") == "eeee5555"
    assert NodeNames([("aaaa1111bbbb", "")]).label("aaaa1111bbbb") == "aaaa1111"


@given(st.sets(st.text("01", min_size=1, max_size=14), max_size=12))
def test_short_ids_stay_different(ids: set[str]) -> None:
    short = short_ids(ids)
    assert len(set(short.values())) == len(ids)
    assert all(full.startswith(cut) for full, cut in short.items())


@given(st.text(max_size=120))
def test_any_model_gives_a_valid_instance_id(model_id: str) -> None:
    assert re.fullmatch("[a-z0-9-]{1,64}", new_instance_id(model_id))


def test_an_instance_is_called_after_its_model() -> None:
    made = new_instance_id("mlx-community/Qwen3-0.6B_4bit")
    assert re.fullmatch("qwen3-0-6b-4bit-[0-9a-f]{4}", made)
