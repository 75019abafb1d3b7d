"""Ranks that each hold a part of every layer, by mlx-lm's own `shard`.

All ranks run the same forward pass, in which MLX sums their parts.
"""

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.utils import load_model

from services.runner.engine.ring import Ring
from services.runner.engine.trace import NotTraceable, trace


class TensorUnsupported(Exception):
    """mlx-lm cannot split this architecture's layers, or not into so many parts."""


class SplitModel:
    """One rank's part of every layer, called on tokens on every rank."""

    def __init__(self, model: nn.Module, *, can_batch: bool) -> None:
        self._model, self.can_batch = model, can_batch

    def make_cache(self, max_token_count: int | None = None) -> list[Any]:
        """Return mlx-lm's empty caches of one sequence."""
        cache = list(make_prompt_cache(self._model))
        if max_token_count is not None and all(type(entry) is KVCache for entry in cache):
            # As in Stage: mlx-lm's own holds on to the first positions, which batches cannot.
            cache = [RotatingKVCache(max_token_count) for _ in cache]
        return cache

    def __call__(self, inputs: mx.array, cache: list[Any]) -> mx.array:
        """Compute, lazily: tokens [B, n] to logits [B, n, vocabulary]."""
        logits: mx.array = self._model(inputs, cache=cache)
        return logits


def load_tensor(path: Path, ring: Ring) -> SplitModel:
    """Load this rank's part of every layer of the model in the folder `path`.

    Raises TensorUnsupported, and what mlx-lm raises for models it cannot load.
    """
    model, _ = load_model(path, lazy=True)
    if not hasattr(model, "shard"):
        raise TensorUnsupported("mlx-lm does not split its layers")
    try:
        can_batch = trace(model).can_batch
    except NotTraceable:
        can_batch = False
    try:
        model.shard(ring.group)
        # Without computing anything: heads that do not divide show in the shapes.
        model(mx.array([[0]]), cache=make_prompt_cache(model))
    except ValueError as error:
        raise TensorUnsupported(f"its parts do not divide by {ring.size}: {error}") from error
    mx.eval(model.parameters())
    return SplitModel(model, can_batch=can_batch)
