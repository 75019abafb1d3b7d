"""Learns from one lazy run of an mlx-lm model how its layers hang together.

Nothing is computed and no weight is ever read or made: every parameter is stood in for by zeros
that are never evaluated, each layer's input by a fresh array of the same shape. Which of those
arrays a later layer's input, or the logits, were made from is then read off MLX's own graph. A cut
before a layer is allowed where all that is computed after it comes from the hidden state handed to
that layer: not from the tokens, not from what earlier layers left elsewhere (shared keys and
values, a first layer's values), not from another side's weights.

The model runs twice, on one token and then on several, so that what caches carry is seen too.
"""

import copy
import io
import os
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models import cache as caches

# Two sequences, so that their axis is told apart from one that happens to have length one.
_ROWS = 2
_PASSES = (1, 5)

# So many values can be named in one export of MLX's graph.
_MOST_NAMES = 1000

_CROSSINGS = {
    "tokens": "later layers are given values made from the tokens",
    "hidden": "later layers use more of earlier ones than the hidden state",
    "weight": "layers share weights",
}


@dataclass(frozen=True)
class CacheEntry:
    """One entry of the model's prompt cache.

    `layers`: those that are given or change it; what is changed before the first layer or after the
    last counts as that layer's. `changes_outside`: something that is no layer changes it.
    `kind`: equal for entries that are at the same position in the same way at any time.
    """

    layers: frozenset[int]
    is_changed: bool
    changes_outside: bool
    kind: Hashable


@dataclass(frozen=True)
class Trace:
    """How the layers of a model hang together.

    `cuts`: every k such that layers [0, k) and [k, count) may be held by different ranks. `why`:
    what stands against the others, empty where there are none. `entries`: the prompt cache's.
    `can_batch`: the caches of sequences of any lengths can be merged, to be stepped together.
    `results`: what each layer returned, with arrays as None, for layers that return more than an
    array. `tail`: the shape of one position's hidden state.
    """

    layer_count: int
    cuts: frozenset[int]
    why: str
    entries: tuple[CacheEntry, ...]
    can_batch: bool
    results: tuple[Any, ...]
    tail: tuple[int, ...]


class NotTraceable(Exception):
    """The model does not run layer by layer, or not without being computed."""


@dataclass(frozen=True)
class _Source:
    """What values are made from: the "tokens" of a run, a "hidden" state given to a layer in it, or
    a "weight" that `layers` use (none: the model around them)."""

    what: str
    number: int
    layers: frozenset[int] = frozenset()


@dataclass
class _Pass:
    """What was seen in one run: layer inputs as handed on, and as the layer got them."""

    number: int
    handed: list[mx.array] = field(default_factory=list)
    taken: list[mx.array] = field(default_factory=list)
    logits: mx.array | None = None


class _Recorder:
    """Stands between a model and its layers for the time of a trace."""

    def __init__(self, model: nn.Module) -> None:
        self.layers = list(model.layers)
        self.cache = list(caches.make_prompt_cache(model))
        self.run = _Pass(0)
        self.results: list[Any] = [None] * len(self.layers)
        self.users: list[set[int]] = [set() for _ in self.cache]
        self.changed = [False] * len(self.cache)
        self.outside = [False] * len(self.cache)
        self.kinds: list[list[Hashable]] = [[_numbers(entry)] for entry in self.cache]
        self.can_batch = True
        self.states: list[list[Any]] = []
        self._seen = [_content(entry) for entry in self.cache]

    def call(
        self, index: int, call: Callable[..., Any], hidden: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Run a layer on a fresh hidden state; note what it is given, changes and returns."""
        if index != len(self.run.handed) or not isinstance(hidden, mx.array):
            raise NotTraceable("its layers do not run one after the other on a hidden state")
        self.note_changes(index, is_inside=False)
        for position in _given(self.cache, (args, kwargs)):
            self.users[position].add(index)
        fresh = mx.zeros(hidden.shape, hidden.dtype)
        # Copies keep naming the same value should the model write in place.
        self.run.handed.append(copy.copy(hidden))
        self.run.taken.append(copy.copy(fresh))
        result = call(fresh, *args, **kwargs)
        self.note_changes(index, is_inside=True)
        if not isinstance(result, mx.array):
            self.results[index] = tree_map(lambda _: None, result)
        return result

    def note_changes(self, index: int, *, is_inside: bool) -> None:
        """Hold layer `index` to have changed what changed since last noted."""
        for position, entry in enumerate(self.cache):
            content = _content(entry)
            if not _same(content, self._seen[position]):
                self._seen[position] = content
                self.users[position].add(index)
                self.changed[position] = True
                self.outside[position] |= not is_inside

    def end_pass(self) -> None:
        """Note what changed after the last layer, and where every cache stands."""
        self.note_changes(len(self.layers) - 1, is_inside=False)
        for kind, entry in zip(self.kinds, self.cache, strict=True):
            kind.append(_numbers(entry))
        parts = [part for entry in self.cache for part in cache_parts(entry)]
        # What has no position is only ever merged as it is: it must be of one shape at any length.
        self.states.append(
            [
                None if array is None else array.shape
                for part in parts
                if isinstance(part, caches.ArraysCache)
                for array in part.cache
            ]
        )
        self.can_batch = (
            all(hasattr(part, "merge") for part in parts) and self.states[0] == self.states[-1]
        )


def trace(model: nn.Module) -> Trace:
    """Trace an mlx-lm model; it is left as it was. Its weights are neither read nor made.

    Raises NotTraceable.
    """
    try:
        return _trace(model)
    except (NotTraceable, MemoryError):
        raise
    except Exception as error:
        # Whatever a model says that is not run in the usual way, such as on two sequences at once.
        raise NotTraceable(f"it cannot be traced: {type(error).__name__}: {error}") from error


def _trace(model: nn.Module) -> Trace:
    with _stood_in(model) as named, _uncompiled():
        recorder = _Recorder(model)
        passes = []
        with _listening(recorder):
            for number, length in enumerate(_PASSES):
                recorder.run = run = _Pass(number)
                tokens = mx.zeros((_ROWS, length), mx.int32)
                named[_Source("tokens", number)] = copy.copy(tokens)
                run.logits = model(tokens, cache=recorder.cache)
                if len(run.handed) != len(recorder.layers):
                    raise NotTraceable("its layers do not run one after the other")
                recorder.end_pass()
                passes.append(run)
        for run in passes:
            for index, array in enumerate(run.taken):
                named[_Source("hidden", run.number, frozenset({index}))] = array
        return _judge(recorder, passes, _sources(passes, named))


def _judge(
    recorder: _Recorder, passes: list[_Pass], sources: list[tuple[int, set[_Source]]]
) -> Trace:
    """`sources`: for every value, the layer it is handed to, and what it was made from."""
    count = len(recorder.layers)
    cuts, reasons = set(), set()
    taken = passes[-1].taken
    tail = tuple(taken[0].shape[2:])
    for cut in range(1, count):
        why = _against(cut, recorder, sources)
        if taken[cut].shape != (_ROWS, _PASSES[-1], *tail):
            why = why or "its hidden state is not one row a position"
        if why:
            reasons.add(why)
        else:
            cuts.add(cut)
    entries = tuple(
        CacheEntry(frozenset(users), changed, outside, tuple(kind))
        for users, changed, outside, kind in zip(
            recorder.users, recorder.changed, recorder.outside, recorder.kinds, strict=True
        )
    )
    why = ", ".join(sorted(reasons))
    results = tuple(recorder.results)
    return Trace(count, frozenset(cuts), why, entries, recorder.can_batch, results, tail)


def _against(cut: int, recorder: _Recorder, sources: list[tuple[int, set[_Source]]]) -> str:
    """Return what stands against a cut before a layer; empty when nothing does."""
    for layer, found in sources:
        is_after = layer > cut
        crossing = {
            source.what
            for source in found
            if (source.what == "tokens" and is_after)
            or (source.layers and all((user < cut) == is_after for user in source.layers))
        }
        for what, why in _CROSSINGS.items():
            if what in crossing:
                return why
    if any(users and min(users) < cut <= max(users) for users in recorder.users):
        return "layers share a cache"
    return ""


def _sources(passes: list[_Pass], named: dict[_Source, mx.array]) -> list[tuple[int, set[_Source]]]:
    """Return, for every value handed to a layer and for the logits, what it is made from."""
    targets, layers = [], []
    for run in passes:
        assert run.logits is not None
        for index, value in enumerate([*run.handed, run.logits]):
            # A node of its own, should the value have a name already.
            targets.append(mx.stop_gradient(value))
            layers.append(index)
    by_name = {f"in{i}": source for i, source in enumerate(named)}
    arrays = dict(zip(by_name, named.values(), strict=True))
    found = []
    at_once = _MOST_NAMES - len(by_name)
    if at_once <= 0:
        raise NotTraceable("it has too many layers")
    for start in range(0, len(targets), at_once):
        sinks = {f"out{i}": target for i, target in enumerate(targets[start : start + at_once])}
        text = io.StringIO()
        mx.export_to_dot(text, *sinks.values(), **sinks, **arrays)
        made_from: dict[str, list[str]] = {}
        for line in text.getvalue().splitlines():
            source, arrow, sink = line.partition(" -> ")
            if arrow:
                made_from.setdefault(sink.strip('"'), []).append(source.strip('"'))
        found += [_reached(sink, made_from) & by_name.keys() for sink in sinks]
    return [
        (layer, {by_name[name] for name in names})
        for layer, names in zip(layers, found, strict=True)
    ]


def _reached(start: str, made_from: dict[str, list[str]]) -> set[str]:
    seen, waiting = {start}, [start]
    while waiting:
        for source in made_from.get(waiting.pop(), ()):
            if source not in seen:
                seen.add(source)
                waiting.append(source)
    return seen


@contextmanager
def _stood_in(model: nn.Module) -> Iterator[dict[_Source, mx.array]]:
    """Give the model parameters that are never made, for a time; yield what they derive from: one
    array for each layer's own, and for each set of layers that share some."""
    users: dict[int, set[int]] = {}
    for index, layer in enumerate(model.layers):
        for _, array in tree_flatten(layer.parameters()):
            users.setdefault(id(array), set()).add(index)
    origins: dict[_Source, mx.array] = {}

    def stand_in(array: mx.array) -> mx.array:
        source = _Source("weight", 0, frozenset(users.get(id(array), ())))
        origin = origins.setdefault(source, mx.zeros(()))
        return mx.broadcast_to(origin.astype(array.dtype), array.shape)

    kept = model.parameters()
    model.update(tree_map(stand_in, kept))
    try:
        yield origins
    finally:
        model.update(kept)


@contextmanager
def _uncompiled() -> Iterator[None]:
    """Have compiled functions run as written, for a time: in MLX's graph all calls of a compiled
    one are a single node, as if they were made from each other."""
    mx.disable_compile()
    try:
        yield
    finally:
        if "MLX_DISABLE_COMPILE" not in os.environ:
            mx.enable_compile()


@contextmanager
def _listening(recorder: _Recorder) -> Iterator[None]:
    """Pass every call of a layer by `recorder`, for a time."""
    classes = [type(layer) for layer in recorder.layers]
    try:
        for index, layer in enumerate(recorder.layers):
            if type(layer) is not classes[index]:
                raise NotTraceable("a layer occurs twice")
            override(layer, lambda call, *a, index=index, **k: recorder.call(index, call, *a, **k))
        yield
    finally:
        for layer, original in zip(recorder.layers, classes, strict=True):
            layer.__class__ = original


def override(module: nn.Module, behaviour: Callable[..., Any]) -> None:
    """Have `module(...)` call `behaviour(the original call, ...)`; all else stays as it is."""
    original = type(module)

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return behaviour(lambda *a, **k: original.__call__(self, *a, **k), *args, **kwargs)

    module.__class__ = type(original.__name__, (original,), {"__call__": call})


def cache_parts(entry: Any) -> list[Any]:
    """Return a cache and those inside it."""
    inner = getattr(entry, "caches", None)
    if not isinstance(inner, list | tuple):
        return [entry]
    return [entry, *(part for child in inner for part in cache_parts(child))]


def _given(cache: list[Any], arguments: Any) -> Iterator[int]:
    """Yield the positions of the entries that occur among a call's arguments."""
    found: set[int] = set()

    def look(value: Any) -> None:
        if isinstance(value, list | tuple):
            for item in value:
                look(item)
        elif isinstance(value, dict):
            look(list(value.values()))
        else:
            found.add(id(value))

    look(arguments)
    for position, entry in enumerate(cache):
        if any(id(part) in found for part in cache_parts(entry)):
            yield position


def _values(entry: Any) -> list[Any]:
    """Return what a cache and those inside it hold: arrays, numbers and the like, in order."""
    values = []
    for part in cache_parts(entry):
        for name, value in sorted(vars(part).items()):
            if name != "caches":
                values += value if isinstance(value, list) else [value]
    return values


def _content(entry: Any) -> list[Any]:
    return [v if isinstance(v, mx.array) else copy.copy(v) for v in _values(entry)]


def _same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(
        x is y if isinstance(x, mx.array) or isinstance(y, mx.array) else x == y
        for x, y in zip(a, b, strict=True)
    )


def _numbers(entry: Any) -> Hashable:
    """Return a cache's types and numbers: its sizes, and where it stands."""
    numbers = tuple(v if isinstance(v, int | float | str | bool) else None for v in _values(entry))
    return tuple(type(part) for part in cache_parts(entry)), numbers
