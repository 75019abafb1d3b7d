"""Loads a stage: mlx-lm's own loading, with only the stage's weights ever in memory."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm import utils

from services.runner.engine.stage import Stage


class WeightsMissing(Exception):
    """The files on disk lack weights that the stage needs; the message names some."""


def load_stage(path: Path, start: int, end: int) -> Stage:
    """Load layers [start, end) of the model in the folder `path` and evaluate their weights.

    The folder may lack weight files that the stage does not need.
    Raises WeightsMissing, StagesUnsupported, and what mlx-lm raises for models it cannot load.
    """
    model, _ = utils.load_model(
        path,
        lazy=True,
        get_model_classes=lambda config: _stage_classes(path, config, start, end),
    )
    stage = Stage(model, start, end)
    mx.eval([layer.parameters() for layer in model.layers[start:end]])
    return stage


def _stage_classes(
    path: Path, config: dict[str, Any], start: int, end: int
) -> tuple[type[nn.Module], type]:
    """Return mlx-lm's classes for `config`; the model's takes the stage's weights only."""
    base, arguments = utils._get_classes(config)
    listed = _listed_weights(path)

    class StageModel(base):  # type: ignore[misc,valid-type]
        def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
            # Sanitizers stack and rename over all layers, so those without files are stood in for.
            absent = listed - weights.keys()
            weights = weights | {name: mx.zeros((1, 1)) for name in absent}
            if hasattr(super(), "sanitize"):
                weights = super().sanitize(weights)
            foreign = _foreign_prefixes(self, start, end)
            return {
                name: weight
                for name, weight in weights.items()
                if name not in absent and not name.startswith(foreign)
            }

        def load_weights(self, weights: list[tuple[str, mx.array]], strict: bool = True) -> None:
            given = dict(weights)
            foreign = _foreign_prefixes(self, start, end)
            own = _layer_prefixes(self)[start:end]
            wanted = {
                name: weight
                for name, weight in tree_flatten(self.parameters())
                if not name.startswith(foreign)
            }
            unknown = sorted(given.keys() - wanted.keys())
            if unknown:
                raise ValueError(f"The files hold weights the model does not have: {unknown[:5]}")
            missing = {name: wanted[name] for name in wanted.keys() - given.keys()}
            own_missing = sorted(name for name in missing if name.startswith(tuple(own)))
            if own_missing:
                raise WeightsMissing(f"The files lack weights of this stage: {own_missing[:5]}")
            # What another stage needs may be absent here. Should this stage use it after all, the
            # result is NaN and warm-up refuses it, instead of an answer from random weights.
            poison = [
                (name, mx.full(weight.shape, mx.nan, weight.dtype))
                for name, weight in missing.items()
                if mx.issubdtype(weight.dtype, mx.floating)
            ]
            self.update(tree_unflatten([*given.items(), *poison]))

    return StageModel, arguments


def _layer_prefixes(model: nn.Module) -> list[str]:
    """Return the parameter name prefix of every layer, such as "model.layers.3."."""
    names = {id(module): name for name, module in model.named_modules()}
    return [f"{names[id(layer)]}." for layer in model.layers]


def _foreign_prefixes(model: nn.Module, start: int, end: int) -> tuple[str, ...]:
    prefixes = _layer_prefixes(model)
    return (*prefixes[:start], *prefixes[end:])


def _listed_weights(path: Path) -> set[str]:
    """Return the weight names in the model's index; none when it has no index."""
    index = path / "model.safetensors.index.json"
    return set(json.loads(index.read_text())["weight_map"]) if index.exists() else set()
