"""Every refusal: its reason, and the figures that come with it."""

from dataclasses import replace
from itertools import pairwise

import pytest

from services.common.errors import Reason, ShardringError
from services.common.status import error_to_trailers
from services.placement.domain.cluster import (
    Backend,
    Cluster,
    Link,
    LinkKind,
    Node,
    RingBackend,
    cluster_of,
)
from services.placement.domain.decide import place, preview
from services.placement.domain.model import Model, Sharding
from services.placement.domain.placement import Placement
from services.placement.domain.request import PlacementRequest
from tests.unit.placement.builders import both_ways, cluster, mesh, model, node, one_way, request

WAY = (Sharding.PIPELINE, RingBackend.MLX_RING)


def refusal(
    of: Cluster, wanted: Model | None = None, asked: PlacementRequest | None = None
) -> ShardringError:
    with pytest.raises(ShardringError) as refused:
        place(of, wanted or model(), {}, asked or request())
    return refused.value


def test_no_nodes() -> None:
    assert refusal(cluster({})).reason is Reason.NO_NODES


def test_required_node_unknown() -> None:
    refused = refusal(cluster({"a": 500}), asked=request(required="azy"))
    assert refused.reason is Reason.REQUIRED_NODE_UNKNOWN
    assert refused.metadata == {"node_ids": "y,z", "node_count": "2"}


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        (model(engine_supported=False), Reason.ARCHITECTURE_UNSUPPORTED),
        (model(()), Reason.MODEL_MALFORMED),
        (model((10, 0)), Reason.MODEL_MALFORMED),
        (model((10, -1)), Reason.MODEL_MALFORMED),
        (model(embedding=-1), Reason.MODEL_MALFORMED),
        (model(tied=1), Reason.MODEL_MALFORMED),
    ],
)
def test_models_that_cannot_be_placed(wanted: Model, reason: Reason) -> None:
    refused = refusal(cluster({"a": 500}), wanted)
    assert refused.reason is reason
    assert refused.metadata["model_id"] == "org/model"


def test_not_enough_nodes() -> None:
    nodes = [node("a"), node("b"), node("c"), node("d", backends=())]
    refused = refusal(cluster_of(nodes, mesh("abcd")), asked=request(3, excluded="c"))
    assert refused.reason is Reason.NOT_ENOUGH_NODES
    assert refused.metadata == {
        "min_node_count": "3",
        "node_count": "2",
        "excluded_count": "1",
        "without_backend": "d",
    }


def test_everything_excluded() -> None:
    refused = refusal(cluster({"a": 500}), asked=request(excluded="a"))
    assert refused.reason is Reason.NOT_ENOUGH_NODES
    assert refused.metadata["node_count"] == "0"


@pytest.mark.parametrize("required", ["", "a"])
def test_no_backend(required: str) -> None:
    others = [node("b")] if required else []
    refused = refusal(
        cluster_of([node("a", backends=()), *others], []), asked=request(required=required)
    )
    assert refused.reason is Reason.BACKEND_UNSUPPORTED
    assert refused.metadata == {"backend": "METAL,CPU,CUDA", "node_ids": "a"}


def test_too_few_layers() -> None:
    refused = refusal(cluster({"a": 500, "b": 500, "c": 500}), model((10, 10)), request(3))
    assert refused.reason is Reason.TOO_FEW_LAYERS
    assert refused.metadata == {"layer_count": "2", "min_node_count": "3"}


def test_more_nodes_than_a_model_may_be_cut_for() -> None:
    nodes = cluster({"a": 500, "b": 600, "c": 500})
    refused = refusal(nodes, model(embedding=7, cuts=[9]), request(3))
    assert refused.reason is Reason.CUT_NOT_ALLOWED
    assert refused.metadata == {
        "model_id": "org/model",
        "allowed_cuts": "9",
        "obstacle": "a reason",
        "most_stage_count": "2",
        "min_node_count": "3",
        "largest_part": "0-8",
        "needed_bytes": "97",
        "available_bytes": "600",
    }
    assert len(place(nodes, model(cuts=[9]), {}, request(2)).ranks) == 2


@pytest.mark.parametrize("cuts", [(), (1, 2, 3)])
def test_what_fits_only_cut_where_it_may_not_be(cuts: tuple[int, ...]) -> None:
    nodes = cluster({"a": 70, "b": 70, "c": 70})
    assert len(place(nodes, model(), {}, request()).ranks) == 2
    refused = refusal(nodes, model(cuts=cuts))
    assert refused.reason is Reason.CUT_NOT_ALLOWED
    assert refused.metadata["allowed_cuts"] == ("1-3" if cuts else "")
    assert refused.metadata["needed_bytes"] == ("90" if cuts else "120")
    # What would not fit either way is short of memory.
    assert refusal(cluster({"a": 30, "b": 30}), model(cuts=cuts)).reason is Reason.NOT_ENOUGH_MEMORY
    # Split layers are not cut apart.
    split = replace(model(cuts=cuts), tensor_supported=True, hidden_size=8, key_value_head_count=4)
    asked = replace(request(), sharding=Sharding.TENSOR)
    assert len(place(nodes, split, {}, asked).ranks) == 2


def test_layer_counts_that_cut_elsewhere() -> None:
    nodes = cluster({"a": 500, "b": 500})
    asked = replace(request(required="ab"), min_node_count=2, layer_counts={"a": 4, "b": 8})
    assert len(place(nodes, model(), {}, asked).ranks) == 2
    # Turned round it may be cut so.
    placed = place(nodes, model(cuts=[8]), {}, asked)
    assert [(rank.node_id, rank.start, rank.end) for rank in placed.ranks] == [
        ("b", 0, 8),
        ("a", 8, 12),
    ]
    refused = refusal(nodes, model(cuts=[5, 6]), asked)
    assert refused.reason is Reason.CUT_NOT_ALLOWED
    assert refused.metadata["allowed_cuts"] == "5-6"


def test_a_preview_says_for_each_size_whether_the_cuts_are_in_the_way() -> None:
    nodes = cluster({"a": 90, "b": 90, "c": 90})
    shown = preview(nodes, model(cuts=[3]), {}, request(), [WAY])
    outcomes = [
        one.outcome.reason if isinstance(one.outcome, ShardringError) else one.node_count
        for one in shown
    ]
    assert outcomes == [Reason.NOT_ENOUGH_MEMORY, 2, Reason.CUT_NOT_ALLOWED]


def test_not_enough_memory_names_the_ring_that_comes_closest() -> None:
    # The pair with "a" is the roomiest that is linked; "c" reaches nobody both ways.
    linked = cluster({"a": 40, "b": 20, "c": 70}, [*both_ways("a", "b"), one_way("c", "a")])
    refused = refusal(linked, asked=request(2))
    assert refused.reason is Reason.NOT_ENOUGH_MEMORY
    assert refused.metadata == {
        "needed_bytes": "120",
        "available_bytes": "60",
        "shortfall_bytes": "60",
        "node_count": "2",
        "node.a.needed_bytes": "80",
        "node.a.available_bytes": "40",
        "node.a.short_bytes": "40",
        "node.b.needed_bytes": "40",
        "node.b.available_bytes": "20",
        "node.b.short_bytes": "20",
        "rejected.2": "memory",
        "rejected.2.memory": "1",
        "rejected.2.not_linked": "2",
        "rejected.3": "not_linked",
        "rejected.3.not_linked": "1",
        "one_way_pairs": "c->a",
        "missing_links": "a->c",
    }
    assert "name-of-a needs 80 bytes and has 40 bytes" in refused.message
    assert "name-of-a does not reach name-of-c" in refused.message


def test_memory_that_suffices_in_sum_only() -> None:
    refused = refusal(cluster({"a": 105, "b": 105}), model((70, 70, 70)))
    assert refused.reason is Reason.NOT_ENOUGH_MEMORY
    assert refused.metadata["shortfall_bytes"] == "0"
    assert refused.metadata["node.a.needed_bytes"] == "140"
    assert "cannot be cut" in refused.message


def test_nodes_without_any_memory() -> None:
    refused = refusal(cluster({"a": 0, "b": 0}), asked=request(2))
    assert refused.reason is Reason.NOT_ENOUGH_MEMORY
    assert refused.metadata["available_bytes"] == "0"


def test_no_ring_counts_what_each_rule_removed() -> None:
    nodes = [node(i) for i in "abcd"] + [node("e", backends=())]
    links = [*both_ways("a", "b"), one_way("b", "c"), one_way("d", "a")]
    refused = refusal(cluster_of(nodes, links), asked=request(3, required="a", excluded="d"))
    assert refused.reason is Reason.NO_RING
    # Of the 10 sets of 3, 6 hold "d"; of the others one lacks "a"; 2 more hold "e".
    assert refused.metadata == {
        "min_node_count": "3",
        "rejected.3": "not_linked",
        "rejected.3.excluded": "6",
        "rejected.3.required": "1",
        "rejected.3.backend": "2",
        "rejected.3.not_linked": "1",
        "one_way_pairs": "b->c",
        "missing_links": "c->b",
    }


def test_a_chain_of_three_is_no_ring() -> None:
    linked = cluster(dict.fromkeys("abc", 500), [*both_ways("a", "b"), *both_ways("b", "c")])
    assert refusal(linked, asked=request(3)).reason is Reason.NO_RING


@pytest.mark.parametrize(
    ("of", "asked", "meant"),
    [
        (cluster({}, gathering=True), request(), Reason.NO_NODES),
        (cluster({"a": 500}, gathering=True), request(2), Reason.NOT_ENOUGH_NODES),
        (cluster({"a": 1}, gathering=True), request(), Reason.NOT_ENOUGH_MEMORY),
        (cluster({"a": 9, "b": 9}, [], gathering=True), request(2), Reason.NO_RING),
        (cluster({}, gathering=True), request(required="a"), Reason.NO_NODES),
    ],
)
def test_while_gathering_it_is_worth_trying_again(
    of: Cluster, asked: PlacementRequest, meant: Reason
) -> None:
    refused = refusal(of, asked=asked)
    assert refused.reason is Reason.TOPOLOGY_GATHERING
    assert refused.metadata["refusal"] == meant
    assert refused.retry_delay_seconds


def test_while_a_node_still_probes_more_links_may_come() -> None:
    def coming(memory: dict[str, int]) -> Cluster:
        return replace(cluster(memory, []), probing=("b",))

    refused = refusal(coming({"a": 9, "b": 900}), asked=request(2))
    assert refused.reason is Reason.LINKS_NOT_VERIFIED
    assert (refused.metadata["refusal"], refused.metadata["probing_node_ids"]) == ("NO_RING", "b")
    assert refused.message.startswith("name-of-b came just now")
    assert refused.retry_delay_seconds
    assert refusal(coming({"a": 9, "b": 9})).metadata["refusal"] == "NOT_ENOUGH_MEMORY"
    # More links make no more nodes, and no better model.
    assert refusal(coming({"a": 9, "b": 9}), asked=request(3)).reason is Reason.NOT_ENOUGH_NODES
    assert refusal(coming({"a": 9, "b": 9}), model(())).reason is Reason.MODEL_MALFORMED
    assert place(coming({"a": 500, "b": 9}), model(), {}, request()).ranks[0].node_id == "a"


def test_while_gathering_what_cannot_change_is_said_at_once() -> None:
    of = cluster({"a": 500}, gathering=True)
    assert refusal(of, model(())).reason is Reason.MODEL_MALFORMED
    assert place(of, model(), {}, request()).ranks[0].node_id == "a"


WAYS = [(Sharding.PIPELINE, RingBackend.MLX_RING)]


def test_previews_show_each_size() -> None:
    linked = cluster({"a": 50, "b": 80, "c": 90, "d": 300}, [*mesh("abc"), one_way("c", "d")])
    previews = preview(linked, model((40,) * 3), {}, request(2, excluded="d"), WAYS)
    assert [found.node_count for found in previews] == [1, 2, 3, 4]
    outcomes = [
        found.outcome.reason
        if isinstance(found.outcome, ShardringError)
        else len(found.outcome.ranks)
        for found in previews
    ]
    assert outcomes == [Reason.NOT_ENOUGH_NODES, 2, 3, Reason.NOT_ENOUGH_NODES]


def test_a_preview_is_what_place_gives() -> None:
    linked = cluster({"a": 50, "b": 80, "c": 90})
    placed = 0
    for found in preview(linked, model(), {}, request(request_id=""), WAYS):
        if isinstance(found.outcome, Placement):
            placed += 1
            given = place(linked, model(), {}, request(found.node_count, request_id=""))
            # Which ring came second is said of what is placed only.
            assert found.outcome == replace(given, score=replace(given.score, runner_up=None))
    assert placed == 2


def test_a_refusal_on_a_large_cluster_fits_into_trailers() -> None:
    ids = [f"0f3a77c1-9b1e-4c55-8d2a-{i:012d}" for i in range(64)]
    nodes = [Node(i, f"a-rather-long-host-name-{i}.local", 10**9, (Backend.CPU,)) for i in ids]
    links = [Link(a, b, "10.0.0.1", LinkKind.WIFI) for a in ids for b in ids if a < b]
    # Neighbours in the list are linked both ways, so that pairs exist and memory is the reason.
    links += [Link(b, a, "10.0.0.1", LinkKind.WIFI) for a, b in pairwise(ids)]
    refused = refusal(cluster_of(nodes, links), model((10**12,) * 64))
    assert refused.reason is Reason.NOT_ENOUGH_MEMORY
    trailers = dict(error_to_trailers(refused))
    # gRPC peers may refuse more than 8 KiB; binary values grow by a third, the text is sent twice.
    size = sum(len(str(key)) + len(value) * 4 / 3 for key, value in trailers.items())
    assert size + len(refused.message) < 8192
