"""The spans of sequences on one rank: "prefill" and "decode", under each caller's own trace."""

import time
from dataclasses import dataclass
from typing import Any

from opentelemetry import trace
from opentelemetry.propagate import extract
from opentelemetry.trace import Span

tracer = trace.get_tracer(__name__)


@dataclass
class _Open:
    context: Any
    span: Span
    began: float
    token_count: int = 0


class SequenceSpans:
    """One span for a sequence's prompt, and one for all tokens after it."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._open: dict[int, _Open] = {}

    @property
    def count(self) -> int:
        """Sequences that are open."""
        return len(self._open)

    def opened(self, sequence: int, carrier: dict[str, str], cached_count: int) -> None:
        """A sequence's prompt begins; `carrier` holds W3C trace headers."""
        context = extract(carrier)
        attributes = {"shardring.rank": self._rank, "shardring.cached_tokens": cached_count}
        span = tracer.start_span("prefill", context=context, attributes=attributes)
        self._open[sequence] = _Open(context, span, time.perf_counter())

    def prefilled(self, sequence: int, token_count: int) -> None:
        """Part of the prompt was computed."""
        self._open[sequence].token_count += token_count

    def joined(self, sequence: int) -> None:
        """The prompt is done, tokens follow."""
        held = self._open[sequence]
        _end(held)
        attributes = {"shardring.rank": self._rank}
        held.span = tracer.start_span("decode", context=held.context, attributes=attributes)
        held.began, held.token_count = time.perf_counter(), 0

    def decoded(self, sequence: int) -> None:
        """One more token was computed."""
        self._open[sequence].token_count += 1

    def left(self, sequence: int) -> None:
        """The sequence is gone."""
        _end(self._open.pop(sequence))


def _end(held: _Open) -> None:
    seconds = max(time.perf_counter() - held.began, 1e-9)
    held.span.set_attribute("shardring.tokens", held.token_count)
    held.span.set_attribute("shardring.tokens_per_second", held.token_count / seconds)
    held.span.end()
