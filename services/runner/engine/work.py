"""What one rank does in a step: carry out commands, compute its part, and choose tokens."""

from collections.abc import Sequence
from typing import Any, Protocol

import mlx.core as mx

from services.runner.child_protocol import Usage, sampling_of
from services.runner.domain.steps import Command
from services.runner.engine.lanes import Caches, Lanes
from services.runner.engine.sampling import Sampler, choose
from services.runner.engine.spans import SequenceSpans
from services.runner.engine.usage import Busy

# How often a rank that works says what it spends.
REPORT_SECONDS = 1.0
_CLEAR_INTERVAL_STEPS = 256


class Model(Protocol):
    """A rank's part of a model: a stage, or a part of every layer.

    `can_batch`: caches of sequences of any lengths can be merged.
    """

    can_batch: bool

    def make_cache(self, max_token_count: int | None = None) -> Caches:
        """Return the empty caches of one sequence."""
        ...

    def __call__(self, inputs: mx.array, cache: Caches) -> mx.array:
        """Compute, lazily: tokens [B, n] or hidden states [B, n, width] to hidden states, or logits
        [B, n, vocabulary]."""
        ...


class Work:
    """One rank's caches, samplers and spans.

    `hands_on`: its model gives hidden states for the next rank, not logits. `chooses`: tokens are
    chosen here. `cache_limit_bytes`: what caches may take, known after the warm-up.
    """

    def __init__(
        self,
        model: Model,
        *,
        hands_on: bool,
        chooses: bool,
        spans: SequenceSpans,
        cache_bits: int = 0,
        max_cache_tokens: int = 0,
    ) -> None:
        self._model, self._spans = model, spans
        self._hands_on, self._chooses = hands_on, chooses
        self._max_cache_tokens = max_cache_tokens or None
        self.lanes = Lanes(self.make_cache, cache_bits)
        self.busy = Busy()
        self._samplers: dict[int, Sampler] = {}
        self._steps = 0
        # While set, logits that are not numbers raise FloatingPointError.
        self.checking = False
        self.cache_limit_bytes = 0

    def make_cache(self) -> Caches:
        """Return the empty caches of one sequence."""
        return self._model.make_cache(self._max_cache_tokens)

    @property
    def sequence_count(self) -> int:
        """Sequences whose caches are held."""
        return self._spans.count

    def apply(self, commands: Sequence[list[Any]]) -> None:
        """Carry out commands. An OPEN has, after its sequence, entry and length, what its sampler
        needs: {"sampling", "tokens" (the last ones), "position" (how many there are),
        "top_logprob_count"}, and the "trace" context it belongs to.
        """
        for command in commands:
            match command:
                case [Command.OPEN, sequence, entry, length, details]:
                    self.lanes.apply([Command.OPEN, sequence, entry, length])
                    self._spans.opened(sequence, details["trace"], length)
                    if self._chooses:
                        self._samplers[sequence] = Sampler(
                            sampling_of(details["sampling"]),
                            details["tokens"],
                            details["top_logprob_count"],
                            position=details["position"],
                        )
                    continue
                case [Command.JOIN, sequence, *_]:
                    self._spans.joined(sequence)
                case [Command.LEAVE | Command.CLOSE, sequence, *_]:
                    self._spans.left(sequence)
                    self._samplers.pop(sequence, None)
            self.lanes.apply(command)

    def prefill(self, sequence: int, inputs: mx.array) -> mx.array | None:
        """Compute part of a prompt; return the hidden state for the next rank, lazily.

        None where nothing is handed on: then the caches, all there is to it, are computed.
        """
        cache = self.lanes.prompt(sequence)
        result = self._model(inputs, cache)
        self.lanes.settle(cache)
        self._spans.prefilled(sequence, inputs.shape[1])
        if self._hands_on:
            return result
        mx.eval([entry.state for entry in cache])
        return None

    def decode(self, lane: int, inputs: mx.array) -> mx.array:
        """Compute one token of each sequence of a lane, lazily.

        Returns the hidden state for the next rank [B, 1, width]; else what `choose` returns, or the
        logits [B, vocabulary] where tokens are chosen elsewhere.
        """
        sequences, cache = self.lanes.lane(lane)
        result = self._model(inputs, cache)
        self.lanes.settle(cache)
        for sequence in sequences:
            self._spans.decoded(sequence)
        if self._hands_on:
            return result
        logits = result[:, -1, :]
        if self.checking:
            check_logits(logits)
        if not self._chooses:
            return logits
        return choose(logits, [self._samplers[sequence] for sequence in sequences])

    def usage(self, *, working: bool) -> Usage:
        """Return what this rank spent since the last time."""
        busy = self.busy.read()
        return Usage(
            working,
            busy if working else 0.0,
            self.lanes.bytes_in_use,
            self.cache_limit_bytes,
            self.lanes.bytes_kept,
        )

    def tidy(self, *, prompt: bool) -> None:
        """After a step: hand memory that MLX keeps for re-use back, as often as mlx-lm does."""
        self._steps += 1
        if prompt or self._steps % _CLEAR_INTERVAL_STEPS == 0:
            mx.clear_cache()


def check_logits(logits: mx.array) -> None:
    """Raise FloatingPointError when a logit is not a number."""
    if mx.isnan(logits).any().item():
        raise FloatingPointError("the model's logits are not numbers")
