"""Where a model may be cut: found out from its config.json, and told by the downloads service."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from services.runner.adapters.probe import Probed, probe_cuts
from shardring.downloads.v1 import downloads_pb2
from tests.contract.downloads_lab import Lab
from tests.fakes.tiny_model import write_model

MODEL = "org/model"

CONFIGS: dict[str, dict[str, Any]] = {
    config["model_type"]: config
    for config in json.loads(
        (Path(__file__).parents[1] / "vectors" / "architectures.json").read_text()
    )
}
# 470 GB of weights; the program that looks at it may take 4 GB.
LARGE = {
    "model_type": "qwen3_moe",
    "hidden_size": 4096,
    "num_hidden_layers": 94,
    "intermediate_size": 12288,
    "num_attention_heads": 64,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 1536,
    "rms_norm_eps": 1e-6,
    "vocab_size": 151936,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "max_position_embeddings": 40960,
    "norm_topk_prob": True,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder / MODEL)
    return folder


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LARGE, Probed(94, tuple(range(1, 94)), "")),
        # From layer 8 on all take the keys and values of layer 7.
        (
            CONFIGS["afm7"],
            Probed(
                16,
                tuple(range(1, 8)),
                "later layers use more of earlier ones than the hidden state",
            ),
        ),
        # All take values of layer 0 ...
        (
            CONFIGS["rwkv7"],
            Probed(4, (), "later layers use more of earlier ones than the hidden state"),
        ),
        # ... or of an embedding for each layer.
        (
            CONFIGS["gemma3n"],
            Probed(4, (), "later layers are given values made from the tokens"),
        ),
    ],
    ids=["large", "afm7", "rwkv7", "gemma3n"],
)
def test_the_engine_says_where_a_model_may_be_cut(config: dict[str, Any], expected: Probed) -> None:
    assert probe_cuts(config["model_type"], config) == expected


@pytest.mark.parametrize("config", [{}, {**LARGE, "num_hidden_layers": 10**9}])
def test_what_cannot_be_found_out_is_not_known(config: dict[str, Any]) -> None:
    assert probe_cuts("qwen3_moe", config) is None


async def test_a_models_facts_say_where_it_may_be_cut(here: Lab) -> None:
    probed: list[str] = []

    def probe(architecture: str, _: Mapping[str, Any]) -> Probed:
        probed.append(architecture)
        return Probed(4, (2,), "a reason")

    node = await here.worker()
    assert not (await here.model(MODEL)).HasField("cuts")
    await here.stop_worker(node)
    node = await here.worker(node_id=node, probe=probe)
    await here.fetch(node, MODEL)
    assert (await here.model(MODEL)).cuts == downloads_pb2.Cuts(layers=[2], obstacle="a reason")
    assert len(probed) == 1
    # Kept beside the model, for as long as the engine is the same.
    await here.stop_worker(node)
    node = await here.worker(node_id=node, offline=True)
    assert (await here.model(MODEL)).cuts.layers == [2]
    await here.stop_worker(node)
    kept = next((here.cache(node) / "models--org--model" / "shardring").glob("*.json"))
    kept.write_text(json.dumps({**json.loads(kept.read_text()), "engine": "older"}))
    await here.worker(node_id=node, offline=True, probe=probe)
    assert (await here.model(MODEL)).cuts.layers == [2]
    assert len(probed) == 2
