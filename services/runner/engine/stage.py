"""Cuts any mlx-lm model into stages, without code for single architectures.

A `Stage` owns a whole mlx-lm model object of which only layers [start, end) ever get weights. Its
layers keep their place and name, so loading, quantising and mask building work as mlx-lm wrote
them; only their class is swapped for a subclass that behaves differently when called:

- layers before and after the stage return their input untouched;
- the stage's first layer takes the hidden state received from the rank before instead of its input;
- on every stage but the last, the stage's last layer ends the forward pass there, so that final
  norm and head never run.

A stage after the first has no tokens. Its embedding gives NaN of the right shape instead, and the
caches of layers it does not hold are filled with NaN: should an architecture use either inside its
layers (values carried past the hidden state), the result is NaN and warm-up refuses the model;
it is never quietly wrong.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import cache as caches


class StagesUnsupported(Exception):
    """The architecture carries more between its layers than one hidden state."""


class _EndOfStage(Exception):
    """Carries the hidden state out of the forward pass of a stage that is not the last."""

    def __init__(self, hidden: mx.array) -> None:
        super().__init__()
        self.hidden = hidden


class Stage:
    """Layers [start, end) of an mlx-lm model, callable on tokens or on a hidden state."""

    def __init__(self, model: nn.Module, start: int, end: int) -> None:
        """Turn `model` into this stage; a model may be turned only once.

        Raises StagesUnsupported where the cut can be seen to be impossible.
        """
        layers = model.layers
        if not 0 <= start < end <= len(layers):
            raise ValueError(f"layers [{start}, {end}) of a model with {len(layers)} layers")
        self.model = model
        self.start, self.end, self.layer_count = start, end, len(layers)
        self.is_first, self.is_last = start == 0, end == len(layers)
        self._received: mx.array | None = None
        if self.is_first and self.is_last:
            return
        if len(caches.make_prompt_cache(model)) != len(layers):
            raise StagesUnsupported("its caches do not match its layers one to one")
        for index, layer in enumerate(layers):
            if not start <= index < end:
                _override(layer, lambda _call, hidden, *_a, **_k: hidden)
        if start:
            _override(layers[start], self._call_first)
            inside = {id(module) for layer in layers for _, module in layer.named_modules()}
            for _, module in model.named_modules():
                if isinstance(module, nn.Embedding | nn.QuantizedEmbedding) and (
                    id(module) not in inside
                ):
                    _override(module, self._embed_nothing)
        if not self.is_last:
            _override(layers[end - 1], self._call_last)

    def make_cache(self) -> list[Any]:
        """Return an empty prompt cache, one entry a layer; only the stage's own entries grow."""
        return list(caches.make_prompt_cache(self.model))

    def own_cache(self, cache: list[Any]) -> list[Any]:
        """Return the entries of `cache` that belong to the stage's own layers."""
        return cache[self.start : self.end]

    def __call__(self, inputs: mx.array, cache: list[Any]) -> mx.array:
        """Run the stage, lazily.

        `inputs`: token ids [1, n] on the first stage, the hidden state [1, n, width] elsewhere.
        Returns the hidden state [1, n, width], on the last stage logits [1, n, vocabulary].
        """
        if self.is_first:
            tokens = inputs
        else:
            self._received = inputs
            tokens = mx.zeros(inputs.shape[:2], mx.int32)
        try:
            result: mx.array = self.model(tokens, cache=cache)
        except _EndOfStage as end:
            result = end.hidden
        finally:
            self._received = None
        for index, entry in enumerate(cache):
            if not self.start <= index < self.end:
                _advance(entry, tokens.shape[1])
        return result

    def _call_first(self, call: Callable[..., Any], _: mx.array, *args: Any, **kwargs: Any) -> Any:
        return call(self._received, *args, **kwargs)

    def _call_last(
        self, call: Callable[..., Any], hidden: mx.array, *args: Any, **kwargs: Any
    ) -> Any:
        result = call(hidden, *args, **kwargs)
        if not isinstance(result, mx.array):
            raise StagesUnsupported("its layers hand on more than one hidden state")
        raise _EndOfStage(result)

    def _embed_nothing(self, _: Callable[..., Any], tokens: mx.array) -> mx.array:
        assert self._received is not None
        width = self._received.shape[-1]
        return mx.full((*tokens.shape, width), mx.nan, self._received.dtype)


def _override(module: nn.Module, behaviour: Callable[..., Any]) -> None:
    """Have `module(...)` call `behaviour(the original call, ...)`; all else stays as it is."""
    original = type(module)

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return behaviour(lambda *a, **k: original.__call__(self, *a, **k), *args, **kwargs)

    module.__class__ = type(original.__name__, (original,), {"__call__": call})


def _advance(entry: Any, count: int) -> None:
    """Move the cache of a layer that was passed over by `count` positions.

    Masks are built from some layer's cache, which may be one of these, so their bookkeeping has to
    go on. Plain caches only count; others are fed one number a position, of one head.
    """
    if isinstance(entry, caches.ArraysCache):
        return
    if isinstance(entry, caches.CacheList):
        for part in entry.caches:
            _advance(part, count)
    elif type(entry) is caches.KVCache and entry.keys is None:
        entry.offset += count
    else:
        nothing = mx.full((1, 1, count, 1), mx.nan)
        mx.eval(entry.update_and_fetch(nothing, nothing))
