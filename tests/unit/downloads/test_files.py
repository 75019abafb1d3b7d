"""Which files a node needs, and which names are safe."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import Reason, ShardringError
from services.downloads.domain.files import (
    NoWeights,
    every_stage_files,
    needed_files,
    weight_files,
)
from services.downloads.domain.header import Malformed
from services.downloads.domain.names import (
    check_model_id,
    check_revision,
    is_commit,
    is_safe_file,
)
from services.downloads.domain.records import Layers, ModelFacts, ModelFile


def index(**weight_map: object) -> bytes:
    return json.dumps({"weight_map": weight_map}).encode()


def test_configuration_and_tokenizer_but_no_code_and_no_other_weights() -> None:
    names = [
        "config.json",
        "tokenizer.model",
        "merges.txt",
        "chat_template.jinja",
        "qwen.tiktoken",
        "model.safetensors.index.json",
        "pytorch_model.bin.index.json",
        "pytorch_model.bin",
        "modeling_x.py",
        "README.md",
        "model.safetensors",
        "original/params.json",
        ".hidden.json",
        "../up.json",
    ]
    assert every_stage_files(names) == sorted(names[:6])


def test_the_index_names_the_weights() -> None:
    names = ["model-1.safetensors", "model-2.safetensors", "consolidated.safetensors"]
    assert weight_files(names, index(a="model-1.safetensors")) == ["model-1.safetensors"]
    assert weight_files(names, None) == names[:2]


@pytest.mark.parametrize(
    "text",
    [
        b"{}",
        b"[]",
        b"{",
        index(),
        index(a="missing.safetensors"),
        index(a="../x.safetensors"),
        index(a="/etc/x.safetensors"),
        index(a=3),
        index(a="model.bin"),
    ],
)
def test_a_bad_index_is_refused(text: bytes) -> None:
    with pytest.raises(Malformed):
        weight_files(["model.safetensors", "model.bin"], text)


@pytest.mark.parametrize("names", [[], ["pytorch_model.bin"], ["consolidated.safetensors"]])
def test_no_weights_is_told_apart(names: list[str]) -> None:
    with pytest.raises(NoWeights):
        weight_files(names, None)


FILES = (
    ModelFile("config.json", 1, every_stage=True),
    ModelFile("embed", 2, first_stage=True),
    ModelFile("ends", 3, first_stage=True, last_stage=True, layers=(0, 1)),
    ModelFile("head", 4, last_stage=True, layers=(3,)),
    ModelFile("middle", 5, layers=(1, 2)),
)
FACTS = ModelFacts(
    "o/n", "c", "llama", True, (1,) * 4, 0, 0, 4, 0, 0, 0, 0, False, "", "", 2, FILES
)


@pytest.mark.parametrize(
    ("layers", "names"),
    [
        (None, ["config.json", "embed", "ends", "head", "middle"]),
        ((0, 1), ["config.json", "embed", "ends"]),
        ((1, 2), ["config.json", "ends", "middle"]),
        ((2, 3), ["config.json", "middle"]),
        ((3, 4), ["config.json", "ends", "head"]),
        ((0, 4), ["config.json", "embed", "ends", "head", "middle"]),
    ],
)
def test_a_stage_needs_its_layers_and_its_end(
    layers: tuple[int, int] | None, names: list[str]
) -> None:
    needed = needed_files(FACTS, Layers(*layers) if layers else None)
    assert [file.name for file in needed] == names


def test_a_stage_beyond_the_model_is_refused() -> None:
    with pytest.raises(ValueError, match="4 layers"):
        needed_files(FACTS, Layers(3, 5))


@given(st.text(max_size=30))
def test_a_safe_name_stays_in_its_folder(name: str) -> None:
    if is_safe_file(name):
        parts = name.split("/")
        assert not name.startswith("/")
        assert not {"", ".", ".."} & set(parts)


@pytest.mark.parametrize("model_id", ["gpt2", "org/name", "Org-1/na.me_2", "a/b"])
def test_names_of_models(model_id: str) -> None:
    assert check_model_id(model_id) == model_id


@pytest.mark.parametrize("revision", ["v1.0", "refs/pr/1", "a" * 40])
def test_names_of_revisions(revision: str) -> None:
    assert check_revision(revision) == revision
    assert check_revision("") == "main"


@pytest.mark.parametrize("revision", ["..", "a/../b", "a/", "-x", "a\x00", "a/./b", "x" * 201])
def test_revisions_that_would_leave_the_folder(revision: str) -> None:
    with pytest.raises(ShardringError) as refused:
        check_revision(revision)
    assert refused.value.reason is Reason.INVALID_FIELD


def test_only_a_full_hash_is_a_commit() -> None:
    assert is_commit("0123456789abcdef" * 2 + "01234567")
    assert not is_commit("main")
    assert not is_commit("abc123")
