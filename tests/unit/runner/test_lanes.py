"""Caches of lanes: whatever sequences join, leave and move, each one's contents stay its own."""

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import cache as caches

from services.runner.domain.cache_room import CacheCost
from services.runner.domain.steps import Command
from services.runner.engine.lanes import (
    Caches,
    CachesNotQuantizable,
    Lanes,
    can_batch,
    cost_of,
)
from services.runner.engine.stage import Stage
from tests.unit.runner.test_stage import build

PLENTY = 10**12

# The last one stands for a layer that re-uses another one's cache: nothing is ever put into it.
KINDS: dict[str, Callable[[], Caches]] = {
    "plain": lambda: [caches.KVCache(), caches.KVCache()],
    "windows": lambda: [caches.RotatingKVCache(7), caches.KVCache(), caches.RotatingKVCache(280)],
    "states": lambda: [caches.ArraysCache(2), caches.KVCache()],
    "lists": lambda: [
        caches.CacheList(caches.ArraysCache(1), caches.RotatingKVCache(9)),
        caches.CacheList(caches.KVCache(), caches.KVCache()),
    ],
    "one unused": lambda: [caches.KVCache(), caches.RotatingKVCache(5), caches.KVCache()],
}
UNUSED = {"one unused": 2}
LENGTHS = [0, 1, 4, 9, 30, 255, 256, 270, 300]


def feed(cache: Any, tokens: mx.array, width: int = 2) -> None:
    """Put tokens [B, n] into a cache as a layer would."""
    if isinstance(cache, caches.CacheList):
        for part in cache.caches:
            feed(part, tokens)
    elif isinstance(cache, caches.ArraysCache):
        for i in range(len(cache.cache)):
            state = mx.zeros((len(tokens), 3)) if cache[i] is None else cache[i]
            cache[i] = mx.concatenate([state, tokens + i], axis=1)[:, -3:]
    else:
        keys = mx.repeat(tokens[:, None, :, None].astype(mx.float32), width, axis=3)
        cache.update_and_fetch(keys, -keys)


def contents(entry: Any) -> Any:
    """Return what a sequence's cache holds, as lists; None: nothing yet."""
    if isinstance(entry, caches.CacheList):
        return [contents(part) for part in entry.caches]
    if isinstance(entry, caches.ArraysCache):
        # Layers take no state for one of zeros.
        return [
            array.tolist() if array is not None and array.any() else None for array in entry.cache
        ]
    if entry.keys is None or not entry.offset:
        return None
    keys, values = entry.keys, entry.values
    count = entry.offset
    if isinstance(entry, caches.RotatingKVCache):
        # What the next token sees beside itself.
        count = min(entry.offset, entry.max_size - 1)
        keys, values = entry._temporal_order(keys), entry._temporal_order(values)
        keys, values = keys[..., -count:, :], values[..., -count:, :]
    return [entry.offset, keys[..., :count, :].tolist(), values[..., :count, :].tolist()]


@dataclass
class Mirror:
    """Lanes, and beside them what every sequence's tokens are."""

    kind: str
    chance: random.Random
    prompts: dict[int, list[int]] = field(default_factory=dict)
    rows: dict[int, dict[int, list[int]]] = field(default_factory=dict)
    kept: dict[int, list[int]] = field(default_factory=dict)
    number: int = 0

    def __post_init__(self) -> None:
        self.lanes = Lanes(KINDS[self.kind])
        cache = KINDS[self.kind]()
        self.feed(cache, [[1] * 3])
        self.trimmable_below = cost_of(cache, PLENTY).trimmable_below

    def feed(self, cache: Caches, tokens: list[list[int]]) -> None:
        for i, entry in enumerate(cache):
            if i != UNUSED.get(self.kind) and tokens[0]:
                feed(entry, mx.array(tokens))

    def step(self) -> None:
        """Do something at random that the schedule might do."""
        choices: list[Callable[[], None]] = [self.open, self.open]
        if self.prompts:
            choices += [self.keep, self.close, *[self.join] * 4]
        if self.rows:
            choices += [*[self.decode] * 4, self.leave, self.move]
        if self.kept:
            choices += [self.open_kept, self.open_kept, self.drop]
        self.chance.choice(choices)()

    def next(self) -> int:
        self.number += 1
        return self.number

    def open(self) -> None:
        sequence, length = self.next(), self.chance.choice(LENGTHS)
        self.lanes.apply([Command.OPEN, sequence, 0, 0])
        self.prompts[sequence] = []
        self.prefill(sequence, length)

    def prefill(self, sequence: int, length: int) -> None:
        tokens = [self.chance.randrange(1, 1000) for _ in range(length)]
        for start in range(0, length, 256):
            self.feed(self.lanes.prompt(sequence), [tokens[start : start + 256]])
        self.prompts[sequence] = self.prompts[sequence] + tokens

    def open_kept(self) -> None:
        sequence, entry = self.next(), self.chance.choice(list(self.kept))
        held = self.kept[entry]
        length = len(held)
        if self.trimmable_below is None or length < self.trimmable_below:
            length = self.chance.randint(1, length)
        self.lanes.apply([Command.OPEN, sequence, entry, length])
        self.prompts[sequence] = held[:length]
        self.prefill(sequence, self.chance.choice([0, 1, 3]))

    def keep(self) -> None:
        sequence = self.chance.choice(list(self.prompts))
        if self.prompts[sequence]:
            entry = self.next()
            self.lanes.apply([Command.KEEP, sequence, entry])
            self.kept[entry] = self.prompts[sequence]

    def close(self) -> None:
        sequence = self.chance.choice(list(self.prompts))
        self.lanes.apply([Command.CLOSE, sequence])
        del self.prompts[sequence]

    def drop(self) -> None:
        entry = self.chance.choice(list(self.kept))
        self.lanes.apply([Command.DROP, entry])
        del self.kept[entry]

    def join(self) -> None:
        sequence, lane = self.chance.choice(list(self.prompts)), self.chance.choice([1, 2, 3])
        self.lanes.apply([Command.JOIN, sequence, lane])
        self.rows.setdefault(lane, {})[sequence] = self.prompts.pop(sequence)

    def decode(self) -> None:
        lane = self.chance.choice(list(self.rows))
        sequences, cache = self.lanes.lane(lane)
        assert sequences == list(self.rows[lane])
        for _ in range(self.chance.choice([1, 1, 2, 9])):
            tokens = [self.chance.randrange(1, 1000) for _ in sequences]
            self.feed(cache, [[token] for token in tokens])
            for sequence, token in zip(sequences, tokens, strict=True):
                self.rows[lane][sequence] = [*self.rows[lane][sequence], token]

    def take(self) -> tuple[int, int, list[int]]:
        lane = self.chance.choice(list(self.rows))
        sequence = self.chance.choice(list(self.rows[lane]))
        tokens = self.rows[lane].pop(sequence)
        if not self.rows[lane]:
            del self.rows[lane]
        return lane, sequence, tokens

    def leave(self) -> None:
        lane, sequence, tokens = self.take()
        entry = self.next() if tokens and self.chance.random() < 0.6 else 0
        self.lanes.apply([Command.LEAVE, sequence, lane, entry])
        if entry:
            self.kept[entry] = tokens

    def move(self) -> None:
        lane, sequence, tokens = self.take()
        to = self.chance.choice([n for n in (1, 2, 3) if n != lane])
        self.lanes.apply([Command.MOVE, sequence, lane, to])
        self.rows.setdefault(to, {})[sequence] = tokens

    def check(self) -> None:
        """Every sequence and every kept entry holds its own tokens, and no more room is taken."""
        cost = self.cost()
        for sequence, tokens in self.prompts.items():
            self.check_one(self.lanes.prompt(sequence), tokens)
        for entry, tokens in self.kept.items():
            self.check_one(self.lanes._kept[entry], tokens)
        for lane, rows in self.rows.items():
            sequences, cache = self.lanes.lane(lane)
            assert sequences == list(rows)
            for place, tokens in enumerate(rows.values()):
                # A copy: taking one out must not be what puts it right.
                one = copy.deepcopy(cache)
                alone = one if len(rows) == 1 else self.lanes._extracted(one, place)
                self.check_one(alone, tokens)
        running = [*map(len, self.prompts.values())]
        for rows in self.rows.values():
            running += [max(map(len, rows.values()))] * len(rows)
        assert self.lanes.bytes_in_use <= sum(map(cost.bytes_for, running))
        assert self.lanes.bytes_kept <= sum(cost.bytes_for(len(t)) for t in self.kept.values())

    def cost(self) -> CacheCost:
        cache = KINDS[self.kind]()
        self.feed(cache, [[1] * 255])
        self.feed(cache, [[1]])
        return cost_of(cache, PLENTY)

    def check_one(self, cache: Caches, tokens: list[int]) -> None:
        expected = KINDS[self.kind]()
        self.feed(expected, [tokens])
        assert [contents(c) for c in cache] == [contents(c) for c in expected]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", KINDS)
def test_every_sequence_keeps_its_own_contents(kind: str, seed: int) -> None:
    mirror = Mirror(kind, random.Random(seed))
    for _ in range(12):
        for _ in range(5):
            mirror.step()
        mirror.check()
    for lane, rows in mirror.rows.items():
        for sequence in rows:
            mirror.lanes.apply([Command.LEAVE, sequence, lane, 0])
    for sequence in mirror.prompts:
        mirror.lanes.apply([Command.CLOSE, sequence])
    assert mirror.lanes.bytes_in_use == 0
    assert mirror.lanes.lane_ids == set()
    for entry in mirror.kept:
        mirror.lanes.apply([Command.DROP, entry])
    assert mirror.lanes.bytes_kept == 0


COSTED = [
    "helium",  # the plain case
    "gemma3n",  # windows, and layers that re-use others' caches
    "qwen3_5",  # states beside keys and values
    "mamba2",  # states only
    "deepseek_v32",  # lists of two caches
    "llama4",  # chunks
]


def prefill(stage: Stage, lanes: Lanes, cache: Caches, start: int, end: int) -> None:
    """Compute positions [start, end) as a ring does, in chunks of a prompt."""
    while start < end:
        stop = min(end, (start // 256 + 1) * 256)
        stage(mx.array([[i % 50 for i in range(start, stop)]]), cache)
        lanes.settle(cache)
        mx.eval([entry.state for entry in cache])
        start = stop


@pytest.mark.parametrize("name", COSTED)
def test_a_sequence_costs_what_its_caches_take(name: str) -> None:
    model = build(name)
    stage = Stage(model, 0, len(model.layers))
    lanes = Lanes(stage.make_cache)
    warm = stage.make_cache()
    prefill(stage, lanes, warm, 0, 255)
    prefill(stage, lanes, warm, 255, 256)
    cost = cost_of(warm, PLENTY)
    whole = name in ("helium", "qwen3_5", "mamba2", "deepseek_v32")
    cache, at = stage.make_cache(), 0
    for length in (1, 2, 255, 256, 257, 600):
        prefill(stage, lanes, cache, at, length)
        at = length
        taken = sum(entry.nbytes for entry in cache)
        # With windows it is a bound, not far off.
        assert taken == cost.bytes_for(length) if whole else taken <= cost.bytes_for(length)
    assert cost.bytes_for(600) <= 3 * taken


@pytest.mark.parametrize("name", COSTED)
def test_what_can_be_cut_back_is_known(name: str) -> None:
    stage = Stage(model := build(name), 0, len(model.layers))
    cache = stage.make_cache()
    prefill(stage, Lanes(stage.make_cache), cache, 0, 4)
    below = cost_of(cache, PLENTY).trimmable_below
    limit = stage.rewind_limit
    # Never more than the model itself can.
    assert limit is None or (below is not None and below <= limit + 1)


def test_caches_that_are_cut_back_give_the_rest_of_their_memory_back() -> None:
    lanes = Lanes(lambda: [caches.KVCache(), caches.RotatingKVCache(2000)])
    lanes.apply([Command.OPEN, 1, 0, 0])
    for entry in lanes.prompt(1):
        feed(entry, mx.array([[7] * 1000]))
    lanes.apply([Command.KEEP, 1, 1])
    lanes.apply([Command.CLOSE, 1])
    lanes.apply([Command.OPEN, 2, 1, 100])
    assert lanes.bytes_in_use <= lanes.bytes_kept * 0.2
    assert [entry.offset for entry in lanes.prompt(2)] == [100, 100]


def test_states_are_never_cut_back() -> None:
    lanes = Lanes(lambda: [caches.ArraysCache(1), caches.KVCache()])
    lanes.apply([Command.OPEN, 1, 0, 0])
    for entry in lanes.prompt(1):
        feed(entry, mx.array([[7] * 10]))
    lanes.apply([Command.KEEP, 1, 1])
    with pytest.raises(ValueError, match="a ArraysCache of 10 tokens cannot be cut to 5"):
        lanes.apply([Command.OPEN, 2, 1, 5])


def test_unknown_commands_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown command"):
        Lanes(lambda: []).apply(["jump", 1])


# Quantized caches.


def quantized(width: int, bits: int = 8) -> Lanes:
    lanes = Lanes(lambda: [caches.KVCache(), caches.KVCache()], bits)
    lanes.apply([Command.OPEN, 1, 0, 0])
    cache, phantom = lanes.prompt(1)
    feed(cache, mx.array([list(range(1, 301))]), width)
    feed(phantom, mx.array([list(range(1, 301))]), 1)
    lanes.settle(lanes.prompt(1))
    return lanes


@pytest.mark.parametrize(("width", "group"), [(128, 64), (64, 64), (96, 32), (32, 32)])
def test_caches_are_quantized_in_the_largest_groups_that_fit(width: int, group: int) -> None:
    lanes = quantized(width, bits=4)
    cache, phantom = lanes.prompt(1)
    assert (cache.bits, cache.group_size) == (4, group)
    # What stands in for another stage's caches is one number wide, and stays.
    assert isinstance(phantom, caches.KVCache)
    assert not can_batch(lanes.prompt(1))
    cost = cost_of(lanes.prompt(1), PLENTY)
    assert cost.bytes_for(300) == lanes.bytes_in_use
    # What follows is quantized as it comes.
    for count in (212, 88):
        feed(cache, mx.array([[5] * count]), width)
        feed(phantom, mx.array([[5] * count]), 1)
    assert cost.bytes_for(600) == lanes.bytes_in_use


def first_values(cache: caches.QuantizedKVCache) -> mx.array:
    """Return the first number of each key, as it was before it was quantized, nearly."""
    (weights, scales, biases), _ = cache.keys_and_values()
    return mx.dequantize(weights, scales, biases, group_size=64, bits=8)[0, 0, :, 0]


def test_quantized_caches_are_cut_back_too() -> None:
    lanes = quantized(64)
    lanes.apply([Command.KEEP, 1, 1])
    lanes.apply([Command.OPEN, 2, 1, 100])
    cache = lanes.prompt(2)[0]
    assert cache.offset == 100
    feed(cache, mx.array([[500]]), 64)
    assert mx.allclose(first_values(cache), mx.array([*range(1, 101), 500]), atol=1)
    assert mx.allclose(first_values(lanes._kept[1][0]), mx.arange(1, 301), atol=1)


def test_caches_that_cannot_be_quantized_say_why() -> None:
    with pytest.raises(CachesNotQuantizable, match="heads are 16 values wide"):
        quantized(16)
    for kind in ("windows", "lists"):
        lanes = Lanes(KINDS[kind], 8)
        with pytest.raises(CachesNotQuantizable, match="mlx-lm has no quantized"):
            lanes.settle(KINDS[kind]())


# Real models.


@pytest.mark.parametrize("name", ["helium", "exaone4", "qwen3_5", "longcat_flash"])
def test_lanes_of_a_model_answer_as_each_sequence_does_alone(name: str) -> None:
    model = build(name)
    stage = Stage(model, 0, len(model.layers))
    assert stage.can_batch
    prompts = {1: [5, 9, 2, 7, 11, 3, 8, 1, 4, 4], 2: [3], 3: [8, 8, 9], 4: [6] * 20}
    count = 20

    def step(cache: Caches, tokens: list[int]) -> list[int]:
        logits = stage(mx.array(tokens)[:, None], cache)[:, -1]
        chosen: Any = mx.argmax(logits, axis=-1).tolist()
        return list(chosen)

    def alone(prompt: list[int]) -> list[int]:
        cache, tokens = stage.make_cache(), list(prompt)
        if prompt[1:]:
            stage(mx.array([prompt[:-1]]), cache)
        while len(tokens) < len(prompt) + count:
            tokens += step(cache, tokens[-1:])
        return tokens

    expected = {sequence: alone(prompt) for sequence, prompt in prompts.items()}
    lanes, tokens = Lanes(stage.make_cache), copy.deepcopy(prompts)

    def join(sequence: int, lane: int) -> None:
        lanes.apply([Command.OPEN, sequence, 0, 0])
        if prompts[sequence][1:]:
            stage(mx.array([prompts[sequence][:-1]]), lanes.prompt(sequence))
        lanes.apply([Command.JOIN, sequence, lane])

    def run(lane: int, count: int) -> None:
        sequences, cache = lanes.lane(lane)
        for _ in range(count):
            chosen = step(cache, [tokens[s][-1] for s in sequences])
            for sequence, token in zip(sequences, chosen, strict=True):
                tokens[sequence].append(token)

    join(1, 1)
    run(1, 2)
    join(2, 1)
    join(3, 1)
    run(1, 3)
    join(4, 2)
    run(2, 1)
    lanes.apply([Command.MOVE, 3, 1, 2])
    run(1, 2)
    run(2, 4)
    lanes.apply([Command.MOVE, 1, 1, 2])
    run(2, 3)
    lanes.apply([Command.LEAVE, 3, 2, 7])
    run(2, 2)
    assert tokens == {s: known[: len(tokens[s])] for s, known in expected.items()}
    # What was kept goes on where it was left.
    lanes.apply([Command.OPEN, 5, 7, len(tokens[3]) - 1])
    lanes.apply([Command.JOIN, 5, 2])
    prompts[5], tokens[5], expected[5] = [], list(tokens[3]), expected[3]
    run(2, 2)
    assert tokens == {s: known[: len(tokens[s])] for s, known in expected.items()}
