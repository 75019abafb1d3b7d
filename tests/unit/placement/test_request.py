from typing import Any

import pytest

from services.common.errors import Reason, ShardringError
from services.placement.domain.request import request_of


def test_defaults() -> None:
    request = request_of(model_id="org/name")
    assert (request.revision, request.min_node_count) == ("main", 1)
    assert request.required == request.excluded == frozenset()


@pytest.mark.parametrize("model_id", ["gpt2", "org/name", "mlx-community/Llama-3.2-1B_4bit.v2"])
def test_hub_names(model_id: str) -> None:
    assert request_of(model_id=model_id).model_id == model_id


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("model_id", {"model_id": ""}),
        ("model_id", {"model_id": "a/b/c"}),
        ("model_id", {"model_id": "../etc"}),
        ("model_id", {"model_id": "org/"}),
        ("model_id", {"model_id": "/name"}),
        ("model_id", {"model_id": "org/na me"}),
        ("model_id", {"model_id": "org/name\n"}),
        ("model_id", {"model_id": "org/" + "n" * 97}),
        ("revision", {"revision": "x" * 257}),
        ("revision", {"revision": "main\n"}),
        ("constraints.min_node_count", {"min_node_count": -1}),
        ("constraints.min_node_count", {"min_node_count": 1025}),
        ("constraints.required_node_ids", {"required": ("",)}),
        ("constraints.required_node_ids", {"required": ("n" * 257,)}),
        ("constraints.required_node_ids", {"required": tuple(map(str, range(1025)))}),
        ("constraints.excluded_node_ids", {"excluded": ("",)}),
        ("constraints.excluded_node_ids", {"excluded": ("b", "a"), "required": ("a",)}),
        ("request_id", {"request_id": "r" * 257}),
    ],
)
def test_refused(field: str, values: dict[str, Any]) -> None:
    with pytest.raises(ShardringError) as refused:
        request_of(**{"model_id": "org/name", **values})
    assert refused.value.reason is Reason.INVALID_FIELD
    assert refused.value.metadata["field"] == field
