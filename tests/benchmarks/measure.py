"""What generations are measured by, and the summary of several."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Run:
    """One generation, or several at once, as whoever asked for them saw it.

    The decode rate counts the tokens that came after the first arrival, of several after the first
    arrival of the last, over the time they took. `seconds`: from the call to the last token.
    """

    tokens: list[int]
    first_token_seconds: float
    decode_tokens_per_second: float
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Tokens over the whole time, prompts included."""
        return len(self.tokens) / self.seconds


# When some tokens of a stream came (time.perf_counter), and how many there were by then.
Arrivals = list[tuple[float, int]]


def run_of(began: float, tokens: list[list[int]], arrivals: list[Arrivals]) -> Run:
    """Sum up streams that began together; every one brought a token."""
    all_begun = max(stream[0][0] for stream in arrivals)
    before = sum(max(n for at, n in stream if at <= all_begun) for stream in arrivals)
    last = max(stream[-1][0] for stream in arrivals)
    together = [token for stream in tokens for token in stream]
    return Run(
        tokens=together,
        first_token_seconds=all_begun - began,
        decode_tokens_per_second=(
            (len(together) - before) / (last - all_begun) if last > all_begun else 0.0
        ),
        seconds=last - began,
    )


@dataclass(frozen=True)
class Spread:
    """Median, least and greatest of several measurements."""

    median: float
    low: float
    high: float

    def __format__(self, spec: str) -> str:
        return f"{self.median:{spec}} ({self.low:{spec}} to {self.high:{spec}})"


def spread(values: Sequence[float]) -> Spread:
    """Summarise measurements; at least one."""
    return Spread(statistics.median(values), min(values), max(values))
