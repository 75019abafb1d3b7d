"""A model's facts from its configuration and the names and sizes of its tensors."""

from typing import Any

import pytest

from services.downloads.domain.card import license_of
from services.downloads.domain.facts import ModelText, model_facts
from services.downloads.domain.header import Header, Malformed, Tensor
from services.downloads.domain.records import ModelFacts, ModelFile


def facts(
    config: dict[str, Any], files: dict[str, dict[str, int]], dtype: str = "BF16"
) -> ModelFacts:
    headers = {
        name: Header({t: Tensor(dtype, size) for t, size in tensors.items()}, 0)
        for name, tensors in files.items()
    }
    return model_facts(
        ModelText(
            model_id="org/name",
            commit="c" * 40,
            config={"model_type": "llama", **config},
            headers=headers,
            sizes={"config.json": 5, **dict.fromkeys(files, 100)},
            has_chat_template=False,
            license="",
            engine_supported=True,
        )
    )


ENDS = {"model.embed_tokens.weight": 50, "model.norm.weight": 1}


def layers(prefix: str, count: int, size: int = 10) -> dict[str, int]:
    return {f"{prefix}.{i}.mlp.weight": size + i for i in range(count)}


@pytest.mark.parametrize(
    ("prefix", "embedding", "norm", "head", "key"),
    [
        ("model.layers", "model.embed_tokens", "model.norm", "lm_head", "num_hidden_layers"),
        ("transformer.h", "transformer.wte", "transformer.ln_f", "lm_head", "n_layer"),
        ("h", "wte", "ln_f", "lm_head", "n_layer"),
        ("backbone.layers", "backbone.embeddings", "backbone.norm_f", "lm_head", "num_layers"),
        (
            "gpt_neox.layers",
            "gpt_neox.embed_in",
            "gpt_neox.final_layer_norm",
            "embed_out",
            "n_layers",
        ),
        ("transformer.blocks", "transformer.wte", "transformer.norm_f", "output", "n_layers"),
    ],
)
def test_layers_are_found_by_any_familys_names(
    prefix: str, embedding: str, norm: str, head: str, key: str
) -> None:
    tensors = {
        f"{embedding}.weight": 50,
        **layers(prefix, 3),
        f"{norm}.weight": 2,
        f"{head}.weight": 40,
    }
    found = facts({key: 3}, {"model.safetensors": tensors})
    assert found.layer_bytes == (10, 11, 12)
    assert (found.embedding_bytes, found.head_bytes, found.weight_bytes) == (50, 42, 125)


def test_a_tied_head_needs_the_embedding_too() -> None:
    found = facts({"num_hidden_layers": 2}, {"a": ENDS, "b": layers("model.layers", 2)})
    assert (found.embedding_bytes, found.head_bytes) == (50, 51)
    assert found.weight_bytes == 50 + 1 + 21
    ends, middle = (file for file in found.files if not file.every_stage)
    assert ends == ModelFile("a", 100, first_stage=True, last_stage=True)
    assert middle == ModelFile("b", 100, layers=(0, 1))
    says = facts(
        {"num_hidden_layers": 2, "tie_word_embeddings": True},
        {"a": {**ENDS, "lm_head.weight": 50, **layers("model.layers", 2)}},
    )
    assert says.head_bytes == 101


def test_a_text_model_inside_another_is_what_counts() -> None:
    config = {
        "num_hidden_layers": 7,
        "text_config": {"num_hidden_layers": 2, "hidden_size": 64, "num_key_value_heads": 3},
    }
    tensors = {
        "language_model.model.embed_tokens.weight": 5,
        **layers("language_model.model.layers", 2),
        **layers("vision_tower.blocks", 7, size=1000),
        "multi_modal_projector.weight": 9,
        "language_model.lm_head.weight": 5,
    }
    found = facts(config, {"m": tensors})
    assert found.layer_bytes == (10, 11)
    assert (found.hidden_size, found.key_value_head_count) == (64, 3)
    # What cannot be told is taken to be needed at both ends.
    vision = sum(layers("vision_tower.blocks", 7, size=1000).values()) + 9
    assert (found.embedding_bytes, found.head_bytes) == (5 + vision, 5 + vision)


def test_layers_may_be_numbered_anew_under_a_further_name() -> None:
    tensors = {
        **ENDS,
        **layers("model.layers", 3),
        **layers("model.kv_reuse_layers", 2, size=5),
        **layers("vision.blocks", 2, size=7),
    }
    found = facts({"num_hidden_layers": 5}, {"m": tensors})
    assert found.layer_bytes == (10, 11, 12, 5, 6)
    assert found.files[-1].layers == (0, 1, 2, 3, 4)
    # Not where the numbers do not add up: layers without weights have none under any name.
    found = facts({"num_hidden_layers": 6}, {"m": tensors})
    assert found.layer_bytes == (10, 11, 12, 0, 0, 0)


def test_extra_layers_behind_the_last_belong_to_the_last_stage() -> None:
    tensors = {**ENDS, **layers("model.layers", 4), "lm_head.weight": 3}
    found = facts({"num_hidden_layers": 3}, {"m": tensors})
    assert (found.layer_bytes, found.head_bytes) == ((10, 11, 12), 13 + 1 + 3)


def test_experts_do_not_pass_for_layers() -> None:
    tensors = {
        f"model.layers.{layer}.mlp.experts.{expert}.weight": 1
        for layer in range(2)
        for expert in range(8)
    }
    assert facts({"num_hidden_layers": 2}, {"m": tensors | ENDS}).layer_bytes == (8, 8)


def test_the_count_is_taken_from_the_weights_when_the_configuration_is_silent() -> None:
    assert facts({}, {"m": ENDS | layers("model.layers", 5)}).layer_bytes == (10, 11, 12, 13, 14)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, ""),
        ({"quantization": {"bits": 4, "group_size": 64}}, "4-bit, group size 64"),
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ({"quantization": {"bits": "four"}, "quantization_config": 3}, ""),
    ],
)
def test_quantisation_in_words(config: dict[str, Any], words: str) -> None:
    assert facts(config, {"m": ENDS | layers("model.layers", 1)}).quantization == words


@pytest.mark.parametrize(
    ("dtype", "config", "width"),
    [
        ("F16", {}, 2),
        ("F32", {"torch_dtype": "bfloat16"}, 4),
        ("U32", {"dtype": "float32"}, 4),
        ("U32", {}, 0),
    ],
)
def test_the_hidden_state_is_as_wide_as_the_weights(
    dtype: str, config: dict[str, Any], width: int
) -> None:
    found = facts(config, {"m": ENDS | layers("model.layers", 1)}, dtype)
    assert found.hidden_bytes_per_value == width


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": 3},
        {"model_type": ""},
        {"num_hidden_layers": 0},
        {"num_hidden_layers": True},
        {"num_hidden_layers": "8"},
        {"num_hidden_layers": 10**9},
        {"num_hidden_layers": 2},
        {"hidden_size": -1},
        {"num_key_value_heads": 2**40},
    ],
)
def test_nonsense_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(Malformed):
        facts({"num_hidden_layers": 5, **config}, {"m": ENDS | {"other.7.weight": 1, "x.9.y": 2}})


@pytest.mark.parametrize(
    ("card", "license_name"),
    [
        ("---\nlicense: apache-2.0\n---\n# x", "apache-2.0"),
        ("---\r\ntags: [a]\r\nlicense: 'mit'\r\n---\r\n", "mit"),
        ("# x\nlicense: mit", ""),
        ("---\nlicense_name: own\n---", ""),
        ("", ""),
    ],
)
def test_the_licence_stands_in_the_front_matter(card: str, license_name: str) -> None:
    assert license_of(card) == license_name
