"""Two sides measured in turns, so that whatever else the machine does meets both."""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from tests.benchmarks.measure import Run, Spread, spread
from tests.benchmarks.quiet import is_quiet, until_quiet
from tests.benchmarks.report import Bar, Figure, Report, table

# After this long a comparison makes do with the rounds it has, if they are not too few.
_LIMIT_SECONDS = 75.0
# How long each round waits for a quiet machine.
_WAIT_SECONDS = 15.0
_LEAST_ROUNDS = 3
# Given the number of the round, from 0 on.
Measure = Callable[[int], Awaitable[Run]]


@dataclass(frozen=True)
class Rate:
    """What is compared: how it is named, and how a run says it, in tokens per second."""

    name: str
    of: Callable[[Run], float]


DECODE = Rate("decode", lambda run: run.decode_tokens_per_second)
# Prompts included.
TOTAL = Rate("total", lambda run: run.tokens_per_second)


@dataclass(frozen=True)
class Comparison:
    """Rounds of one run of each side, next to each other in time."""

    title: str
    ours: list[Run]
    theirs: list[Run]
    rate: Rate = DECODE
    sides: tuple[str, str] = ("Shardring", "mlx-lm")
    disturbed: bool = False

    def add(self, ours: Run, theirs: Run) -> None:
        """Add a round."""
        self.ours.append(ours)
        self.theirs.append(theirs)

    @property
    def rate_ratio(self) -> Spread:
        """Our rate over theirs, of each round."""
        of = self.rate.of
        return spread([of(a) / of(b) for a, b in zip(self.ours, self.theirs, strict=True)])

    def report(self, name: str, bar: Bar | None = None) -> Report:
        """Show both sides; `bar` is for the ratio of the rates, ours over theirs."""
        rounds = f"{len(self.ours)} {'disturbed' if self.disturbed else 'undisturbed'} rounds"
        shown = table(
            f"{self.title}: median (least to greatest) of {rounds}",
            "",
            f"{self.rate.name}, tokens/s",
            "first token, s",
        )
        figures = []
        for label, runs in zip(self.sides, (self.ours, self.theirs), strict=True):
            rate = spread([self.rate.of(run) for run in runs])
            first = spread([run.first_token_seconds for run in runs])
            shown.add_row(label, f"{rate:.1f}", f"{first:.3f}")
            key = f"{name}.{label.lower()}"
            figures.append(Figure(f"{key}.{self.rate.name}", rate.median, "tokens/s"))
            figures.append(Figure(f"{key}.first_token", first.median, "s"))
        ratio = self.rate_ratio
        shown.add_row("ratio of each round", f"{ratio:.3f}", "")
        unit = f"of {self.sides[1]}'s {self.rate.name} rate"
        figures.append(Figure(f"{name}.ratio", ratio.median, unit, bar, self.disturbed))
        return Report([shown], figures)


async def compare(
    title: str,
    ours: Measure,
    theirs: Measure,
    rounds: int,
    rate: Rate = DECODE,
    sides: tuple[str, str] = ("Shardring", "mlx-lm"),
) -> Comparison:
    """Measure both sides in turns, each being first in every other round.

    Waits for a quiet machine, within bounds, and repeats rounds that something else disturbed;
    disturbed rounds count only when there are too few others. Raises RuntimeError when the two
    sides do not give the same tokens: then they did not do the same work.
    """
    everything = Comparison(title, [], [], rate, sides)
    quiet = Comparison(title, [], [], rate, sides)
    end = time.monotonic() + _LIMIT_SECONDS
    while len(quiet.ours) < rounds:
        done = len(everything.ours)
        if done >= _LEAST_ROUNDS and time.monotonic() > end:
            break
        undisturbed = await until_quiet(_WAIT_SECONDS)
        if done % 2:
            b, a = await theirs(done), await ours(done)
        else:
            a, b = await ours(done), await theirs(done)
        if a.tokens != b.tokens:
            raise RuntimeError(f"{title}: the two sides gave different tokens")
        everything.add(a, b)
        if undisturbed and await is_quiet():
            quiet.add(a, b)
    return quiet if len(quiet.ours) >= _LEAST_ROUNDS else replace(everything, disturbed=True)
