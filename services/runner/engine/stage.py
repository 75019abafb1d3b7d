"""Cuts any mlx-lm model into stages, without code for single architectures.

A `Stage` owns a whole mlx-lm model object of which only layers [start, end) ever get weights. Its
layers keep their place and name, so loading, quantising and mask building work as mlx-lm wrote
them; only their class is swapped for a subclass that behaves differently when called:

- layers before the stage return their input untouched;
- the stage's first layer takes the hidden state received from the rank before instead of its input;
- on every stage but the last, the first layer after the stage ends the forward pass there, so that
  the rest, final norm and head never run.

Where the model may be cut is learnt from the model itself: see `services.runner.engine.trace`.

A stage has caches for its own layers only. Masks and offsets are built from some layer's cache,
which need not be its own; but a cache of its own that is of the same kind stands at the same
position, so it stands in for the other. Where it has none of a kind, it has a phantom: a cache one
number wide, moved on with the rest.

A stage after the first has no tokens. Its embedding gives NaN of the right shape instead, phantoms
hold NaN, and so do all other values of the layers before: should an architecture use any of them,
the result is NaN and warm-up refuses the model; it is never quietly wrong.
"""

from collections.abc import Callable, Collection, Hashable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from mlx_lm.models import cache as caches

from services.common.ranges import ranges
from services.runner.engine.trace import (
    CacheEntry,
    NotTraceable,
    Trace,
    cache_parts,
    override,
    trace,
)


class StagesUnsupported(Exception):
    """The model cannot be cut here; the message says where it can."""


class _EndOfStage(Exception):
    """Carries the hidden state out of the forward pass of a stage that is not the last."""

    def __init__(self, hidden: mx.array) -> None:
        super().__init__()
        self.hidden = hidden


class Stage:
    """Layers [start, end) of an mlx-lm model, callable on tokens or on a hidden state.

    The same on all ranks of a model: `can_batch`, whether caches of sequences of any lengths can be
    merged; `rewind_limit`, how many tokens a sequence can hold and still be trimmed (0: never;
    None: any number).
    """

    def __init__(self, model: nn.Module, start: int, end: int) -> None:
        """Turn `model` into this stage; a model may be turned only once.

        Raises StagesUnsupported where the model cannot be cut at `start` or `end`.
        """
        layers = model.layers
        if not 0 <= start < end <= len(layers):
            raise ValueError(f"layers [{start}, {end}) of a model with {len(layers)} layers")
        self.model = model
        self.start, self.end, self.layer_count = start, end, len(layers)
        self.is_first, self.is_last = start == 0, end == len(layers)
        self._received: mx.array | None = None
        self._tail: tuple[int, ...] = ()
        self._slots: _Slots | None = None
        self.can_batch, self.rewind_limit = False, _rewind_limit(caches.make_prompt_cache(model))
        try:
            traced = trace(model)
        except NotTraceable as why:
            if self.is_first and self.is_last:
                return
            raise StagesUnsupported(str(why)) from why
        self.can_batch = traced.can_batch
        if self.is_first and self.is_last:
            return
        _check_cuts(traced, {start, end} - {0, len(layers)})
        self._tail = traced.tail
        self._slots = _Slots(traced.entries, caches.make_prompt_cache(model), start, end)
        for index, layer in enumerate(layers[:start]):
            override(layer, _pass_by(traced.results[index]))
        if start:
            override(layers[start], self._call_first)
            inside = {id(module) for layer in layers for _, module in layer.named_modules()}
            for _, module in model.named_modules():
                if isinstance(module, nn.Embedding | nn.QuantizedEmbedding) and (
                    id(module) not in inside
                ):
                    override(module, self._embed_nothing(module))
        if not self.is_last:
            override(layers[end], self._call_beyond)

    def make_cache(self, max_token_count: int | None = None) -> list[Any]:
        """Return empty mlx-lm caches of one sequence, for this stage's own layers.

        Phantoms may follow them: treat all alike (merge, extend, filter, extract, trim).
        `max_token_count`: keep that many last positions only, in models each of whose layers has a
        plain cache (others keep theirs).
        """
        cache: list[Any] = list(caches.make_prompt_cache(self.model))
        is_plain = len(cache) == self.layer_count and all(type(e) is caches.KVCache for e in cache)
        if max_token_count is not None and is_plain:
            # Not mlx-lm's own, which holds on to the first positions too: batches cannot.
            cache = [caches.RotatingKVCache(max_token_count) for _ in cache]
        return cache if self._slots is None else [cache[i] for i in self._slots.held]

    def __call__(self, inputs: mx.array, cache: list[Any]) -> mx.array:
        """Run the stage, lazily.

        `inputs`: token ids [B, n] on the first stage, the hidden state [B, n, width] elsewhere.
        `cache`: from `make_cache` (any B of equal length), or such merged into batch caches.
        Returns the hidden state [B, n, width], on the last stage logits [B, n, vocabulary].
        """
        if self._slots is None:
            whole: mx.array = self.model(inputs, cache=cache)
            return whole
        rows, count = inputs.shape[:2]
        tokens = inputs
        if not self.is_first:
            self._received = inputs.reshape(rows, count, *self._tail)
            tokens = mx.zeros((rows, count), mx.int32)
        try:
            result: mx.array = self.model(tokens, cache=self._slots.fill(cache))
        except _EndOfStage as end:
            result = end.hidden.reshape(rows, count, -1)
        finally:
            self._received = None
        self._slots.advance(cache, rows, count)
        return result

    def _call_first(self, call: Callable[..., Any], _: mx.array, *args: Any, **kwargs: Any) -> Any:
        return call(self._received, *args, **kwargs)

    def _call_beyond(self, _: Callable[..., Any], hidden: mx.array, *_a: Any, **_k: Any) -> Any:
        raise _EndOfStage(hidden)

    def _embed_nothing(self, module: nn.Module) -> Callable[..., mx.array]:
        weight, is_quantized = module.weight, isinstance(module, nn.QuantizedEmbedding)
        width = weight.shape[-1] * 32 // module.bits if is_quantized else weight.shape[-1]

        def embed(_: Callable[..., Any], tokens: mx.array) -> mx.array:
            assert self._received is not None
            return mx.full((*tokens.shape, width), mx.nan, self._received.dtype)

        return embed


class _Slots:
    """Which of a stage's caches stands where the model expects one of every layer.

    `held`: the entries of the model's cache that a stage's cache is made of: its own, then its
    phantoms.
    """

    def __init__(
        self, entries: tuple[CacheEntry, ...], cache: list[Any], start: int, end: int
    ) -> None:
        own = [i for i, e in enumerate(entries) if any(start <= user < end for user in e.layers)]
        self._own_count = len(own)
        self.held = list(own)
        standing: dict[Hashable, int] = {
            entries[i].kind: place
            for place, i in reversed(list(enumerate(own)))
            if entries[i].is_changed and not entries[i].changes_outside
        }
        # Beyond what the stage holds: caches that nothing will ever change.
        self._untouched: list[tuple[int, Any]] = []
        self._thrown_away: list[tuple[int, Callable[[], Any]]] = []
        self._places: list[int] = [0] * len(entries)
        for place, i in enumerate(own):
            self._places[i] = place
        for i, entry in enumerate(entries):
            if i in own:
                continue
            if entry.changes_outside:
                # What the model's embedding or head keep; another stage's, so forgotten at once.
                self._thrown_away.append((i, _maker(cache[i])))
            elif not entry.is_changed:
                self._untouched.append((i, cache[i]))
            elif entry.kind in standing:
                self._places[i] = standing[entry.kind]
            elif isinstance(cache[i], caches.ArraysCache):
                self._untouched.append((i, cache[i]))  # it has no position
            else:
                _check_phantom(cache[i])
                self._places[i] = standing[entry.kind] = len(self.held)
                self.held.append(i)

    def fill(self, cache: list[Any]) -> list[Any]:
        """Return a cache as the whole model expects it."""
        whole = [cache[place] for place in self._places] if cache else [None] * len(self._places)
        for i, entry in self._untouched:
            whole[i] = entry
        for i, make in self._thrown_away:
            whole[i] = make()
        return whole

    def advance(self, cache: list[Any], rows: int, count: int) -> None:
        """Move the phantoms on by `count` positions."""
        for entry in cache[self._own_count :]:
            _advance(entry, rows, count)


def allowed_cuts(model: nn.Module) -> tuple[list[int], str]:
    """Return every layer before which `model` may be cut, and why not before the others."""
    try:
        traced = trace(model)
    except NotTraceable as why:
        return [], str(why)
    return sorted(traced.cuts), traced.why


def _rewind_limit(cache: list[Any]) -> int | None:
    if not caches.can_trim_prompt_cache(cache):
        return 0
    parts = [part for entry in cache for part in cache_parts(entry)]
    # One that has come to its size has begun to forget.
    limits = [p.max_size - 1 for p in parts if isinstance(p, caches.RotatingKVCache)]
    limits += [p.chunk_size for p in parts if isinstance(p, caches.ChunkedKVCache)]
    return min(limits, default=None)


def _check_cuts(traced: Trace, cuts: Collection[int]) -> None:
    """Raise StagesUnsupported when one of `cuts` is not allowed."""
    wrong = sorted(set(cuts) - traced.cuts)
    if wrong:
        where = f"only before layers {ranges(traced.cuts)}, not {wrong[0]}"
        raise StagesUnsupported(
            f"it may be cut {where if traced.cuts else 'nowhere'}: {traced.why}"
        )


def _pass_by(structure: Any) -> Callable[..., Any]:
    """Return a layer's stand-in: its input, as the first of as many results as the layer has."""
    if structure is None:
        return lambda _call, hidden, *_a, **_k: hidden

    def call(_: Callable[..., Any], hidden: mx.array, *_a: Any, **_k: Any) -> Any:
        rest = iter([hidden])
        return tree_map(
            lambda _: next(rest, mx.array(mx.nan)), structure, is_leaf=lambda leaf: leaf is None
        )

    return call


def _maker(entry: Any) -> Callable[[], Any]:
    if isinstance(entry, caches.ArraysCache):
        size = len(entry.cache)
        return lambda: caches.ArraysCache(size)
    raise StagesUnsupported(f"its ends share a cache of kind {type(entry).__name__}")


def _check_phantom(entry: Any) -> None:
    """Raise StagesUnsupported for a cache that cannot be moved on with nothing in it."""
    if isinstance(entry, caches.CacheList):
        for part in entry.caches:
            _check_phantom(part)
    elif not isinstance(entry, caches.ArraysCache) and not hasattr(entry, "update_and_fetch"):
        raise StagesUnsupported(f"its layers read a cache of kind {type(entry).__name__}")


def _advance(entry: Any, rows: int, count: int) -> None:
    """Move a phantom by `count` positions: one number a position, of one head."""
    if isinstance(entry, caches.CacheList):
        for part in entry.caches:
            _advance(part, rows, count)
    elif isinstance(entry, caches.ArraysCache):
        for index in range(len(entry.cache)):
            entry[index] = mx.full((rows, 1), mx.nan)
    else:
        # On the processor, whatever else computes: nothing waits for it.
        with mx.stream(mx.cpu):
            nothing = mx.full((rows, 1, count, 1), mx.nan)
            mx.async_eval(entry.update_and_fetch(nothing, nothing))  # type: ignore[no-untyped-call]
