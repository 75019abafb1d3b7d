"""The key-value caches of one rank: of prompts, of lanes, and those kept for prompts to come.

A lane of one sequence has mlx-lm's plain caches, so that it computes what one sequence alone
computes, to the bit; a lane of several has mlx-lm's batch caches.
"""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.generate import _merge_caches
from mlx_lm.models import cache as caches

from services.runner.domain.cache_room import CacheCost, round_up
from services.runner.domain.steps import Command

# Values that share a scale: mlx-lm's default, and the other that MLX has for narrower heads.
_GROUP_SIZES = (64, 32)

Caches = list[Any]


class CachesNotQuantizable(Exception):
    """Caches of this model cannot be quantized; the message says why."""


class Lanes:
    """Carries out the schedule's commands.

    `make_cache` makes the empty caches of one sequence. `bits` quantizes them; 0: as they are.
    """

    def __init__(self, make_cache: Callable[[], Caches], bits: int = 0) -> None:
        self._make_cache, self.bits = make_cache, bits
        self._prompts: dict[int, Caches] = {}
        self._lanes: dict[int, tuple[list[int], Caches]] = {}
        self._kept: dict[int, Caches] = {}

    def apply(self, command: list[Any]) -> None:
        """Carry out one command."""
        match command:
            case [Command.OPEN, sequence, entry, length]:
                self._prompts[sequence] = self._opened(entry, length)
            case [Command.KEEP, sequence, entry]:
                self._kept[entry] = copy.deepcopy(self._prompts[sequence])
            case [Command.JOIN, sequence, lane]:
                self._put_in(lane, sequence, self._prompts.pop(sequence))
            case [Command.LEAVE, sequence, lane, entry]:
                taken = self._take_out(lane, sequence, wanted=bool(entry))
                if entry:
                    self._kept[entry] = taken
            case [Command.MOVE, sequence, lane, to]:
                self._put_in(to, sequence, self._take_out(lane, sequence, wanted=True))
            case [Command.CLOSE, sequence]:
                del self._prompts[sequence]
            case [Command.DROP, entry]:
                del self._kept[entry]
            case _:
                raise ValueError(f"unknown command {command}")

    def prompt(self, sequence: int) -> Caches:
        """Return the caches of a sequence whose prompt is being computed."""
        return self._prompts[sequence]

    def lane(self, lane: int) -> tuple[list[int], Caches]:
        """Return a lane's sequences, in the order of its batch, and its caches."""
        return self._lanes[lane]

    @property
    def lane_ids(self) -> set[int]:
        """The lanes there are."""
        return set(self._lanes)

    def settle(self, cache: Caches) -> None:
        """After a step: quantize what came to caches, where that is asked for.

        Raises CachesNotQuantizable.
        """
        for i, entry in enumerate(cache if self.bits else []):
            if (size := _group_size(entry)) is not None:
                cache[i] = entry.to_quantized(group_size=size, bits=self.bits)

    @property
    def bytes_in_use(self) -> int:
        """Bytes of the caches of prompts and lanes."""
        return _bytes([*self._prompts.values(), *(cache for _, cache in self._lanes.values())])

    @property
    def bytes_kept(self) -> int:
        """Bytes of the caches kept for prompts to come."""
        return _bytes(self._kept.values())

    def _opened(self, entry: int, length: int) -> Caches:
        if not entry:
            return self._make_cache()
        opened = copy.deepcopy(self._kept[entry])
        # Not size(): quantized caches have none, and those with a window tell of that only.
        held = max((getattr(cache, "offset", 0) for cache in _leaves(opened)), default=0)
        if held > length:
            for cache in opened:
                if not cache.is_trimmable():
                    kind = type(cache).__name__
                    raise ValueError(f"a {kind} of {held} tokens cannot be cut to {length}")
                cache.trim(held - length)
            for cache in _leaves(opened):
                _cut(cache)
        return opened

    def _put_in(self, lane: int, sequence: int, added: Caches) -> None:
        if lane not in self._lanes:
            self._lanes[lane] = ([sequence], added)
            return
        sequences, cache = self._lanes[lane]
        if len(sequences) == 1:
            cache = _merge_caches([cache, added])
        else:
            for batch, other in zip(cache, _merge_caches([added]), strict=True):
                batch.extend(other)
        _align(cache)
        self._lanes[lane] = ([*sequences, sequence], cache)

    def _take_out(self, lane: int, sequence: int, *, wanted: bool) -> Caches:
        sequences, cache = self._lanes.pop(lane)
        place = sequences.index(sequence)
        if len(sequences) == 1:
            return cache
        taken = self._extracted(cache, place) if wanted else []
        keep = [i for i in range(len(sequences)) if i != place]
        if len(keep) == 1:
            cache = self._extracted(cache, keep[0])
        else:
            cache = [_filtered(batch, keep) for batch in cache]
            _align(cache)
        # Left lazy, what was taken would hold on to the whole batch.
        mx.eval([entry.state for entry in (*taken, *cache)])
        self._lanes[lane] = ([sequences[i] for i in keep], cache)
        return taken

    def _extracted(self, cache: Caches, place: int) -> Caches:
        empty = self._make_cache()
        taken = [_extract(*each, place) for each in zip(cache, empty, strict=True)]
        _align(taken)
        return taken


def _extract(batch: Any, empty: Any, place: int) -> Any:
    """Return the cache of one sequence of a batch, as mlx-lm does, which fails on empty ones."""
    if isinstance(batch, caches.CacheList):
        parts = zip(batch.caches, empty.caches, strict=True)
        return caches.CacheList(*(_extract(*part, place) for part in parts))
    if isinstance(batch, caches.ArraysCache):
        for i, array in enumerate(batch.cache):
            empty[i] = None if array is None else array[place : place + 1]
        return empty
    return empty if batch.keys is None else batch.extract(place)


def _filtered(batch: Any, keep: list[int]) -> Any:
    """Return a batch with only the sequences at these places, no longer than they need."""
    if isinstance(batch, caches.CacheList):
        batch.caches = tuple(_filtered(part, keep) for part in batch.caches)
        return batch
    if isinstance(batch, caches.BatchRotatingKVCache) and batch.keys is not None:
        # Its own filter leaves the padding that only a longer sequence needed.
        rows = [batch.extract(place) for place in keep]
        return caches.BatchRotatingKVCache.merge(rows)
    batch.filter(keep)
    return batch


def _cut(entry: Any) -> None:
    """Let go of what a cache that was trimmed still has arrays for."""
    if not entry.empty() and entry.offset:
        rotates = isinstance(entry, caches.RotatingKVCache)
        count = entry.offset if rotates else round_up(entry.offset)
        entry.keys, entry.values = tree_map(
            lambda array: array[..., :count, :], (entry.keys, entry.values)
        )


def _align(cache: Caches) -> None:
    """Have caches have room for whole steps, as those have that grew token by token.

    So they take what `CacheCost` says; they would have to grow with the next token anyway.
    """
    for entry in _leaves(cache):
        if isinstance(entry, caches.KVCache | caches.BatchKVCache) and entry.keys is not None:
            missing = round_up(entry.keys.shape[2]) - entry.keys.shape[2]
            if missing:
                padding = [(0, 0), (0, 0), (0, missing), (0, 0)]
                entry.keys = mx.pad(entry.keys, padding)
                entry.values = mx.pad(entry.values, padding)


def cost_of(cache: Iterable[Any], limit_bytes: int) -> CacheCost:
    """Return what a sequence costs, judged by one's caches, which hold some tokens."""
    fixed, kinds, below = 0, dict[int, int](), list[int]()
    for entry in _leaves(cache):
        if isinstance(entry, caches.ArraysCache):
            fixed += entry.nbytes
        else:
            window: int = getattr(entry, "max_size", 0) or getattr(entry, "chunk_size", 0)
            each = -(-_bytes([[entry]]) // max(1, _allocated(entry)))
            kinds[window] = kinds.get(window, 0) + each
        if (limit := _trimmable_below(entry)) is not None:
            below.append(limit)
    told = tuple((each, window) for window, each in kinds.items())
    return CacheCost(fixed, told, limit_bytes, min(below, default=None))


def _trimmable_below(entry: Any) -> int | None:
    match entry:
        case caches.KVCache() | caches.QuantizedKVCache():
            return None
        case caches.RotatingKVCache():
            return int(entry.max_size)
        case caches.ChunkedKVCache():
            return int(entry.chunk_size)
    # States have no positions, and mlx-lm's ConcatenateKVCache forgets that it was cut.
    return 0


def can_batch(cache: Iterable[Any]) -> bool:
    """Say whether mlx-lm merges such caches into a batch."""
    return all(hasattr(entry, "merge") for entry in cache)


def _leaves(cache: Iterable[Any]) -> Iterable[Any]:
    for entry in cache:
        if isinstance(entry, caches.CacheList):
            yield from _leaves(entry.caches)
        else:
            yield entry


def _allocated(entry: Any) -> int:
    """Return for how many tokens a cache has arrays."""
    keys = getattr(entry, "keys", None)
    if isinstance(keys, tuple | list):  # quantized: values, scales, biases
        keys = keys[0]
    return int(keys.shape[2]) if keys is not None else 1


def _bytes(held: Iterable[Caches]) -> int:
    return sum(entry.nbytes for cache in held for entry in cache)


def _group_size(entry: Any) -> int | None:
    """Return how many values share a scale where a cache is to be quantized; None: not this one.

    Raises CachesNotQuantizable.
    """
    # States of state-space layers stay as they are, and so do a stage's phantoms, one number wide.
    if isinstance(entry, caches.QuantizedKVCache | caches.ArraysCache):
        return None
    if not isinstance(entry, caches.KVCache):
        raise CachesNotQuantizable(f"mlx-lm has no quantized {type(entry).__name__}")
    if entry.keys is None:
        return None
    widths = {entry.keys.shape[-1], entry.values.shape[-1]}
    if widths == {1}:
        return None
    for size in _GROUP_SIZES:
        if not any(width % size for width in widths):
            return size
    known = " and ".join(str(width) for width in sorted(widths))
    raise CachesNotQuantizable(
        f"its attention heads are {known} values wide, which is no multiple of {_GROUP_SIZES[-1]}"
    )
