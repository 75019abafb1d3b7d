"""The key-value caches of one rank: of prompts, of lanes, and those kept for prompts to come.

A lane of one sequence has mlx-lm's plain caches, so that it computes what one sequence alone
computes, to the bit; a lane of several has mlx-lm's batch caches.
"""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import mlx.core as mx
from mlx_lm.generate import _merge_caches, maybe_quantize_kv_cache
from mlx_lm.models import cache as caches

from services.runner.domain.cache_room import CacheCost
from services.runner.domain.schedule import Command

_GROUP_SIZE = 64

Caches = list[Any]


class Lanes:
    """Carries out the schedule's commands.

    `make_cache` makes the empty caches of one sequence. `bits` quantizes them; 0: as they are.
    """

    def __init__(self, make_cache: Callable[[], Caches], bits: int = 0) -> None:
        self._make_cache, self._bits = make_cache, bits
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
        """After a step: quantize what came to caches, where that is asked for."""
        if self._bits:
            maybe_quantize_kv_cache(cache, 0, _GROUP_SIZE, self._bits)

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
        held = max((cache.size() for cache in opened), default=0)
        if held > length:
            caches.trim_prompt_cache(opened, held - length)
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
        self._lanes[lane] = ([*sequences, sequence], cache)

    def _take_out(self, lane: int, sequence: int, *, wanted: bool) -> Caches:
        sequences, cache = self._lanes.pop(lane)
        place = sequences.index(sequence)
        if len(sequences) == 1:
            return cache
        taken = [batch.extract(place) for batch in cache] if wanted else []
        keep = [i for i in range(len(sequences)) if i != place]
        if len(keep) == 1:
            cache = [batch.extract(keep[0]) for batch in cache]
        else:
            for batch in cache:
                batch.filter(keep)
        # Left lazy, what was taken would hold on to the whole batch.
        mx.eval([entry.state for entry in (*taken, *cache)])
        self._lanes[lane] = ([sequences[i] for i in keep], cache)
        return taken


def cost_of(cache: Iterable[Any], limit_bytes: int) -> CacheCost:
    """Return what a sequence costs, judged by one's caches, which hold some tokens."""
    fixed, kinds = 0, dict[int, int]()
    for entry in _leaves(cache):
        if isinstance(entry, caches.ArraysCache):
            fixed += entry.nbytes
            continue
        window = getattr(entry, "max_size", 0) or 0
        kinds[window] = kinds.get(window, 0) + -(-entry.nbytes // max(1, _allocated(entry)))
    return CacheCost(fixed, tuple((each, window) for window, each in kinds.items()), limit_bytes)


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
    if isinstance(keys, tuple):  # quantized: values, scales, biases
        keys = keys[0]
    return int(keys.shape[2]) if keys is not None else 1


def _bytes(held: Iterable[Caches]) -> int:
    return sum(entry.nbytes for cache in held for entry in cache)
