"""The engine's architectures are found without importing it, and as it finds them itself."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.utils import _get_classes

from services.downloads.domain.records import Cuts
from services.downloads.worker.engine import EngineSupport

SPEC = importlib.util.find_spec("mlx_lm")
assert SPEC is not None
assert SPEC.submodule_search_locations is not None
MODELS = Path(SPEC.submodule_search_locations[0]) / "models"
MODULES = sorted(path.stem for path in MODELS.glob("*.py"))


@dataclass(frozen=True)
class Probed:
    layer_count: int
    cuts: tuple[int, ...]
    obstacle: str


def engine_has(config: dict[str, object]) -> bool:
    try:
        _get_classes(config)
    except (ValueError, AttributeError, SystemExit):  # Some exit when a library is missing.
        return False
    return True


def test_every_module_is_judged_as_the_engine_does() -> None:
    engine = EngineSupport()
    judged = {name: engine.supports({"model_type": name}) for name in MODULES}
    assert judged == {name: engine_has({"model_type": name}) for name in MODULES}
    assert sum(judged.values()) > 50


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "mistral"},
        {"model_type": "falcon_mamba"},
        {"model_type": "bailing_hybrid", "architectures": ["BailingMoeV3ForCausalLM"]},
        {"model_type": "bailing_hybrid", "architectures": "BailingMoeV3ForCausalLM"},
        {"model_type": "llama", "architectures": []},
        {"model_type": "t5"},
        {"model_type": "bert", "auto_map": {"AutoModel": "x.Y"}},
        {"model_type": "no_such_type"},
    ],
)
def test_renamed_and_unknown_architectures(config: dict[str, object]) -> None:
    assert EngineSupport().supports(config) == engine_has(config)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"model_type": 3},
        {"model_type": "../utils"},
        {"model_type": "../../../etc/passwd"},
        {"model_type": "base"},
        {"model_type": "llama", "model_file": "own.py"},
        {"model_type": "llama2", "architectures": [3, None]},
    ],
)
def test_what_the_engine_cannot_run(config: dict[str, object]) -> None:
    assert not EngineSupport().supports(config)


def test_every_architecture_is_split_or_not_as_the_engine_does() -> None:
    engine = EngineSupport()
    vectors = Path(__file__).parents[2] / "vectors" / "architectures.json"
    configs = json.loads(vectors.read_text())
    configs += [{"model_type": name} for name in MODULES if engine.supports({"model_type": name})]
    judged = {config["model_type"]: engine.supports_tensor(config) for config in configs}
    assert judged == {
        config["model_type"]: hasattr(_get_classes(config)[0], "shard") for config in configs
    }
    assert 10 < sum(judged.values()) < len(judged)
    assert not engine.supports_tensor({"model_type": "no_such_type"})
    assert not engine.supports_tensor({"model_type": "llama", "model_file": "own.py"})


def test_where_a_model_may_be_cut_is_probed_once() -> None:
    asked: list[tuple[str, Mapping[str, Any]]] = []

    def probe(architecture: str, config: Mapping[str, Any]) -> Probed | None:
        asked.append((architecture, config))
        return None if config.get("hidden_size") == 0 else Probed(4, (1, 3), "a reason")

    engine = EngineSupport(probe)
    config = {"model_type": "mistral", "hidden_size": 8}
    for _ in range(2):
        assert engine.cuts(config, 4) == Cuts((1, 3), "a reason")
    assert asked == [("llama", config)]
    # The files have other layers than the engine would make.
    assert engine.cuts(config, 5) is None
    # Found out at another time, maybe.
    unknown = {"model_type": "llama", "hidden_size": 0}
    assert engine.cuts(unknown, 4) is None
    assert engine.cuts(unknown, 4) is None
    assert len(asked) == 3
    assert engine.cuts({"model_type": "t5"}, 4) is None
    assert len(asked) == 3


def test_neither_the_engine_nor_mlx_is_imported() -> None:
    code = (
        "import sys; from services.downloads.worker.engine import EngineSupport; "
        "assert EngineSupport().supports({'model_type': 'llama'}); "
        "print([m for m in sys.modules if m.split('.')[0] in ('mlx', 'mlx_lm')])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
