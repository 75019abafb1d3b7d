"""From logits to tokens, on the last rank. mlx-lm's samplers and logits processors do the work.

What is chosen for a sequence depends on its own logits, settings and tokens only: the random
number of a token is made of the request's seed and the token's absolute position, and greedy
tokens are mlx-lm's `generate_step`'s to the bit.
"""

from collections.abc import Callable, Iterator, Sequence
from struct import pack
from struct import unpack as unpack_bytes
from typing import NamedTuple

import mlx.core as mx
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from services.runner.domain.request import Sampling

# The tokens that penalties look back on: mlx-lm's default, and what the protos promise.
PENALTY_TOKENS = 20
# Stands for the logarithm of zero, and for what is not a number: JSON has neither.
LOWEST_LOGPROB = -9999.0
# Nearer to zero, dividing by a temperature would leave the range of the numbers: greedy.
_LOWEST_TEMPERATURE = 1e-5
# Nearer to zero, mlx-lm's cut would drop even the likeliest token.
_LOWEST_TOP_P = 1e-6
# Fills the list of the likeliest where the vocabulary has fewer.
_NO_TOKEN = -1
_MASK = 2**64 - 1

_Choose = Callable[[mx.array], mx.array]
_Processor = Callable[[mx.array, mx.array], mx.array]


class ChosenToken(NamedTuple):
    """A chosen token; where asked for, its log-probability and the likeliest (id, logprob)."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Sampler:
    """Chooses one sequence's tokens, in order. Used by `choose`, which also tells it what was
    chosen, as an array that need not be evaluated."""

    def __init__(
        self,
        sampling: Sampling,
        tokens: Sequence[int],
        top_logprob_count: int | None = None,
        *,
        position: int | None = None,
    ) -> None:
        """`tokens`: all so far, prompt and generated, before the first that is to be chosen; the
        last PENALTY_TOKENS do, where `position` says how many there are.

        `top_logprob_count`: log-probabilities are wanted, and those of so many likeliest.
        """
        self._sampling, self._seed = sampling, sampling.seed
        self._recent = list(tokens[-PENALTY_TOKENS:])
        self._buffer = mx.array([], mx.int32)
        # Of the token to be chosen next, from 0 on.
        self._position = len(tokens) if position is None else position
        self._is_greedy = sampling.temperature < _LOWEST_TEMPERATURE
        self._has_penalty = (
            sampling.repetition_penalty != 1
            or sampling.frequency_penalty != 0
            or sampling.presence_penalty != 0
        )
        self._vocabulary: int | None = None
        self._processors: list[_Processor] = []
        self._sample: _Choose | None = None
        self.top_logprob_count = top_logprob_count
        # The likeliest token by the model's own logits, and nothing else: needs no state.
        self.is_plain = (
            self._is_greedy
            and not self._has_penalty
            and not sampling.logit_bias
            and top_logprob_count is None
        )

    def take(self, logits: mx.array, logprobs: mx.array) -> tuple[mx.array, mx.array]:
        """Return the next token [1] (int32), and the logits it was chosen by, lazily.

        `logits`: the sequence's own, [1, vocabulary]; `logprobs`: theirs. The token counts as the
        sequence's latest from now on.
        """
        if self._vocabulary is None:
            self._prepare(logits.shape[-1])
        if self._processors:
            for process in self._processors:
                logits = process(self._buffer, logits)
            logprobs = _logprobs(logits)
        if self._sample is None:
            token = _likeliest(logprobs)
        else:
            mx.random.seed(_mixed(self._seed, self._position))
            token = self._sample(logprobs.astype(mx.float32)).astype(mx.int32)
        self._position += 1
        if self._has_penalty:
            self._buffer = mx.concatenate([self._buffer[1 - PENALTY_TOKENS :], token])
        return token, logits

    def _prepare(self, vocabulary: int) -> None:
        """Make mlx-lm's functions. Ids that the logits do not have are left out: MLX does not
        check the bounds of what it writes to."""
        settings, self._vocabulary = self._sampling, vocabulary
        known = [token for token in self._recent if 0 <= token < vocabulary]
        self._buffer = mx.array(known, mx.int32)
        bias = {i: value for i, value in settings.logit_bias if 0 <= i < vocabulary}
        penalty = settings.repetition_penalty
        self._processors = make_logits_processors(
            logit_bias=bias or None,
            repetition_penalty=penalty if penalty != 1 else None,
            repetition_context_size=PENALTY_TOKENS,
            presence_penalty=settings.presence_penalty,
            presence_context_size=PENALTY_TOKENS,
            frequency_penalty=settings.frequency_penalty,
            frequency_context_size=PENALTY_TOKENS,
        )
        if not self._is_greedy:
            self._sample = _uncompiled(
                make_sampler(
                    temp=settings.temperature,
                    # mlx-lm's "off" is 0 for all three.
                    top_p=0.0 if settings.top_p >= 1 else max(settings.top_p, _LOWEST_TOP_P),
                    min_p=settings.min_p,
                    top_k=settings.top_k if settings.top_k < vocabulary else 0,
                )
            )


def choose(logits: mx.array, samplers: Sequence[Sampler]) -> mx.array:
    """Choose each sequence's next token from `logits` [B, vocabulary], lazily.

    Returns ONE int32 vector: the B tokens; then, for each sequence that asked for them, the chosen
    token's log-probability (the bits of a float32), the k likeliest ids, likeliest first, and
    their k log-probabilities (bits). `unpack` reads it. The samplers have then taken the tokens
    as theirs: the next call is about the next tokens, whether or not these are evaluated by then.
    """
    logprobs = _logprobs(logits)
    if all(sampler.is_plain for sampler in samplers):
        return _likeliest(logprobs)
    tokens: list[mx.array] = []
    extras: list[mx.array] = []
    for row, sampler in enumerate(samplers):
        own = slice(row, row + 1)
        # Slices are arrays of their own: what mlx-lm writes into one, no other sequence sees.
        token, own_logits = sampler.take(logits[own], logprobs[own])
        tokens.append(token)
        if sampler.top_logprob_count is not None:
            extras += _extras(token, own_logits, sampler.top_logprob_count)
    return mx.concatenate(tokens + extras)


def unpack(numbers: Sequence[int], wanted: Sequence[int | None]) -> list[ChosenToken]:
    """Read what `choose` returned. `wanted`: each sampler's `top_logprob_count`, in order."""
    chosen: list[ChosenToken] = []
    rest = len(wanted)
    for token, count in zip(numbers, wanted, strict=False):
        if count is None:
            chosen.append(ChosenToken(token))
            continue
        ids = numbers[rest + 1 : rest + 1 + count]
        values = numbers[rest + 1 + count : rest + 1 + 2 * count]
        top = tuple(
            (i, _float(bits)) for i, bits in zip(ids, values, strict=True) if i != _NO_TOKEN
        )
        chosen.append(ChosenToken(token, _float(numbers[rest]), top))
        rest += 1 + 2 * count
    return chosen


def _logprobs(logits: mx.array) -> mx.array:
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def _likeliest(logprobs: mx.array) -> mx.array:
    # Of the log-probabilities, not the logits: rounding makes some equal, and then the first one
    # is mlx-lm's choice.
    return mx.argmax(logprobs, axis=-1).astype(mx.int32)


def _extras(token: mx.array, logits: mx.array, count: int) -> Iterator[mx.array]:
    """Yield the int32 vectors that follow the tokens for one sequence: 1, count and count long."""
    logprobs = _logprobs(logits.astype(mx.float32))[0]
    logprobs = mx.maximum(mx.where(mx.isnan(logprobs), -mx.inf, logprobs), LOWEST_LOGPROB)
    yield logprobs[token].view(mx.int32)
    known = min(count, logprobs.size)
    if known:
        ids = mx.argpartition(-logprobs, kth=known - 1)[:known]
        ids = ids[mx.argsort(-logprobs[ids])].astype(mx.int32)
        yield ids
        yield mx.full(count - known, _NO_TOKEN, mx.int32)
        yield logprobs[ids].view(mx.int32)
        yield mx.zeros(count - known, mx.int32)


def _float(bits: int) -> float:
    value: float = unpack_bytes("<f", pack("<i", bits))[0]
    return value


def _mixed(seed: int, position: int) -> int:
    """Return 64 bits that look random, made of both (the finalizer of splitmix64, twice)."""
    mixed = seed & _MASK
    for more in (0, position + 1):
        mixed = (mixed + more * 0x9E3779B97F4A7C15) & _MASK
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        mixed ^= mixed >> 31
    return mixed


def _uncompiled(sample: _Choose) -> _Choose:
    """Have mlx-lm's compiled functions not compiled inside `sample`.

    MLX keeps a compiled function for each value of its numbers for ever, and searches them all at
    each call: clients that choose ever new temperatures would slow a rank down, and fill it.
    """

    def call(logprobs: mx.array) -> mx.array:
        mx.disable_compile()
        try:
            return sample(logprobs)
        finally:
            mx.enable_compile()

    return call
