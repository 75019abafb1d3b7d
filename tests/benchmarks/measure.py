"""What a generation is measured by, and the summary of several."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Run:
    """One generation, as whoever asked for it saw it.

    The rate counts the tokens that came after the first arrival, over the time they took.
    """

    tokens: list[int]
    first_token_seconds: float
    decode_tokens_per_second: float


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
