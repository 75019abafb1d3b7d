"""One request over ranks that each hold a part of every layer, by mlx-lm's own `shard`.

All ranks run the same forward pass, in which MLX sums their parts. What to compute comes from rank
0, which alone samples: so a different rounding on another rank never lets the ranks part.

Prompts are cut as in `generation`.
"""

from collections.abc import Callable, Generator
from enum import IntEnum
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from services.runner.domain.request import Sampling
from services.runner.engine.generation import (
    CLEAR_INTERVAL_TOKENS,
    check_logits,
    chunks,
    seeded_sampler,
)
from services.runner.engine.ring import Ring

OnProgress = Callable[[int], None]


class TensorUnsupported(Exception):
    """mlx-lm cannot split this architecture's layers, or not into so many parts."""


class _Op(IntEnum):
    """What all ranks do next, as rank 0 says."""

    PREFILL = 1
    SAMPLE = 2
    END = 3


def load_tensor(path: Path, ring: Ring) -> nn.Module:
    """Load this rank's part of every layer of the model in the folder `path`.

    Raises TensorUnsupported, and what mlx-lm raises for models it cannot load.
    """
    model, _ = load_model(path, lazy=True)
    if not hasattr(model, "shard"):
        raise TensorUnsupported("mlx-lm does not split its layers")
    try:
        model.shard(ring.group)
    except ValueError as error:
        raise TensorUnsupported(str(error)) from error
    mx.eval(model.parameters())
    return model


def generate_as_head(
    model: nn.Module,
    ring: Ring,
    prompt: list[int],
    sampling: Sampling,
    max_tokens: int,
    on_progress: OnProgress,
    *,
    check: bool = False,
) -> Generator[int, None, None]:
    """Yield token ids on rank 0; ends after `max_tokens` or when closed, on all ranks.

    With `check`, raises FloatingPointError when a logit is not a number.
    """
    cache = make_prompt_cache(model)
    sampler = seeded_sampler(sampling)
    try:
        done = 0
        for chunk in chunks(prompt):
            _share(ring, [_Op.PREFILL, len(chunk)])
            _prefill(model, _share(ring, chunk), cache)
            done += len(chunk)
            on_progress(done)
        token = prompt[-1]
        for count in range(1, max_tokens + 1):
            _share(ring, [_Op.SAMPLE, token])
            logits = _logits(model, token, cache)
            if check:
                check_logits(logits)
            chosen: Any = sampler(logits - mx.logsumexp(logits, keepdims=True)).item()
            token = int(chosen)
            yield token
            if count % CLEAR_INTERVAL_TOKENS == 0:
                mx.clear_cache()
    finally:
        _share(ring, [_Op.END, 0])


def follow(model: nn.Module, ring: Ring) -> tuple[int, int]:
    """Work on one request on any rank but 0, until the head ends it.

    Returns how many prompt tokens and how many sampling steps passed.
    """
    cache = make_prompt_cache(model)
    prefilled = sampled = 0
    while True:
        op, number = _share(ring, [0, 0])
        if op == _Op.END:
            return prefilled, sampled
        if op == _Op.PREFILL:
            _prefill(model, _share(ring, [0] * number), cache)
            prefilled += number
        else:
            mx.eval(_logits(model, number, cache))
            sampled += 1
            if sampled % CLEAR_INTERVAL_TOKENS == 0:
                mx.clear_cache()


def _prefill(model: nn.Module, tokens: list[int], cache: list[Any]) -> None:
    model(mx.array([tokens]), cache=cache)
    mx.eval([entry.state for entry in cache])
    mx.clear_cache()


def _logits(model: nn.Module, token: int, cache: list[Any]) -> mx.array:
    logits: mx.array = model(mx.array([[token]]), cache=cache)[:, -1, :]
    return logits


def _share(ring: Ring, numbers: list[int]) -> list[int]:
    """Return the head's numbers on every rank; the others give as many zeros."""
    total = mx.distributed.all_sum(mx.array(numbers, mx.int32), group=ring.group)
    shared: Any = total.tolist()
    return list(shared)
