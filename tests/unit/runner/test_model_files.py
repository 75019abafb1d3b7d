"""A model's small files, and the zip of its tokenizer's."""

import io
import json
import zipfile
from pathlib import Path

import pytest

from services.common.errors import Reason, ShardringError
from services.runner.adapters.model_files import model_facts, tokenizer_files


def test_a_large_tokenizer_is_zipped_alike_each_time(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(bytes(range(256)) * 2000)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "modeling.py").write_text("program")
    (tmp_path / "vocab.json").mkdir()
    first, again = tokenizer_files(tmp_path), tokenizer_files(tmp_path)
    assert first == again
    names = zipfile.ZipFile(io.BytesIO(first.data)).namelist()
    assert names == ["config.json", "tokenizer.model"]


def test_a_model_without_tokenizer_is_malformed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ShardringError) as error:
        tokenizer_files(tmp_path)
    assert error.value.reason is Reason.MODEL_MALFORMED


@pytest.mark.parametrize("content", ["{", "[]", ""])
def test_a_config_that_says_nothing_is_malformed(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ShardringError) as error:
        model_facts(tmp_path)
    assert error.value.reason is Reason.MODEL_MALFORMED


def test_facts_of_models_that_say_things_otherwise(tmp_path: Path) -> None:
    inner = {"max_position_embeddings": 4096, "vocab_size": 10, "eos_token_id": [7, 8]}
    config = {"model_type": "gemma3", "text_config": inner, "pad_token_id": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    facts = model_facts(tmp_path)
    assert (facts.model_type, facts.context_token_count, facts.vocabulary_size) == (
        "gemma3",
        4096,
        10,
    )
    assert (facts.end_token_ids, facts.start_token_id) == ((7, 8), 0)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert model_facts(tmp_path).end_token_ids == (7, 9)
