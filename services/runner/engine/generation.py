"""One request through the ring, as each rank sees it.

Prompts are cut as mlx-lm's `generate_step` cuts them (chunks up to the last token, then the last
token alone), so that a ring computes what one machine computes, to the bit.
"""

from collections.abc import Callable, Generator, Iterator
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import make_sampler

from services.runner.domain.request import Sampling
from services.runner.engine.ring import Op, Ring, Step
from services.runner.engine.stage import Stage

PREFILL_CHUNK_TOKENS = 2048
CLEAR_INTERVAL_TOKENS = 256

OnProgress = Callable[[int], None]


def _ignore(_: int) -> None:
    """Report no progress."""


def chunks(prompt: list[int]) -> Iterator[list[int]]:
    """Yield all of a prompt but its last token, cut as mlx-lm cuts it."""
    for start in range(0, len(prompt) - 1, PREFILL_CHUNK_TOKENS):
        yield prompt[start : min(start + PREFILL_CHUNK_TOKENS, len(prompt) - 1)]


def generate_alone(
    stage: Stage,
    prompt: list[int],
    sampling: Sampling,
    max_tokens: int,
    on_progress: OnProgress = _ignore,
) -> Generator[int, None, None]:
    """Yield token ids on a ring of one; ends after `max_tokens` or when closed.

    `on_progress` is told how many prompt tokens are done; what it raises ends the generation.
    """
    sampler = seeded_sampler(sampling)
    tokens = generate_step(
        mx.array(prompt),
        stage.model,
        max_tokens=max_tokens,
        sampler=sampler,
        prefill_step_size=PREFILL_CHUNK_TOKENS,
        prompt_progress_callback=lambda done, _: on_progress(done),
    )
    for token, _ in tokens:
        yield token


def generate_as_head(
    stage: Stage,
    ring: Ring,
    prompt: list[int],
    max_tokens: int,
    on_progress: OnProgress = _ignore,
) -> Generator[int, None, None]:
    """Yield token ids on rank 0; ends after `max_tokens` or when closed, and the ring with it.

    Whatever ends it, the other ranks are told, unless the ring itself is broken.
    """
    cache = stage.make_cache()
    try:
        done = 0
        for chunk in chunks(prompt):
            ring.send(Step(Op.PREFILL, stage(mx.array([chunk]), cache)))
            mx.clear_cache()
            done += len(chunk)
            on_progress(done)
        token = mx.array(prompt[-1:])
        for count in range(1, max_tokens + 1):
            ring.send(Step(Op.SAMPLE, stage(token[None], cache)))
            token = ring.receive_token()
            yield _id(token)
            if count % CLEAR_INTERVAL_TOKENS == 0:
                mx.clear_cache()
    finally:
        ring.send(Step(Op.END))


def follow(stage: Stage, ring: Ring, sampling: Sampling, *, check: bool = False) -> tuple[int, int]:
    """Work on one request on any rank but 0, until the head ends it.

    On the last rank `sampling` chooses the tokens. With `check`, raises FloatingPointError when a
    logit is not a number. Returns how many prompt tokens and how many sampling steps passed.
    """
    cache = stage.make_cache()
    sampler = seeded_sampler(sampling)
    prefilled = sampled = 0
    while (step := ring.receive()).op is not Op.END:
        assert step.hidden is not None
        result = stage(step.hidden, cache)
        if not ring.is_last:
            ring.send(Step(step.op, result))
        elif step.op is Op.PREFILL:
            mx.eval([entry.state for entry in stage.own_cache(cache)])
        else:
            logits = result[:, -1, :]
            if check:
                check_logits(logits)
            ring.send_token(sampler(logits - mx.logsumexp(logits, keepdims=True)))
        if step.op is Op.PREFILL:
            prefilled += step.hidden.shape[1]
            mx.clear_cache()
        else:
            sampled += 1
            if sampled % CLEAR_INTERVAL_TOKENS == 0:
                mx.clear_cache()
    if not ring.is_last:
        ring.send(Step(Op.END))
    return prefilled, sampled


def _id(token: Any) -> int:
    return int(token.item())


def check_logits(logits: mx.array) -> None:
    """Raise FloatingPointError when a logit is not a number."""
    if mx.isnan(logits).any().item():
        raise FloatingPointError("the model's logits are not numbers")


def seeded_sampler(sampling: Sampling) -> Callable[[mx.array], mx.array]:
    """Return mlx-lm's sampler for log probabilities [1, vocabulary], random from the seed on."""
    mx.random.seed(sampling.seed)
    sampler: Any = make_sampler(
        temp=sampling.temperature,
        # mlx-lm's "off" is 0.
        top_p=0.0 if sampling.top_p == 1 else sampling.top_p,
        min_p=sampling.min_p,
        top_k=sampling.top_k,
    )
    return sampler  # type: ignore[no-any-return]
