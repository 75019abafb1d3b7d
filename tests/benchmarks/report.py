"""What a benchmark found, and how it is shown."""

from dataclasses import dataclass, field
from typing import Literal

from rich.table import Table


@dataclass(frozen=True)
class Bar:
    """What a figure must be: at least, or below, a limit."""

    sign: Literal[">=", "<"]
    limit: float

    def cleared_by(self, value: float) -> bool:
        """Say whether a value is good enough."""
        return value >= self.limit if self.sign == ">=" else value < self.limit


@dataclass(frozen=True)
class Figure:
    """One number that came out. Without a bar it is there to be read.

    `disturbed`: other work on the machine had a part in it.
    """

    name: str
    value: float
    unit: str
    bar: Bar | None = None
    disturbed: bool = False

    @property
    def missed(self) -> bool:
        """True for a figure that must be better."""
        return self.bar is not None and not self.bar.cleared_by(self.value)

    def __str__(self) -> str:
        text = f"{self.name} {self.value:.4g} {self.unit}"
        if self.disturbed:
            text += ", disturbed"
        if self.bar is None:
            return text
        verdict = "MISSED" if self.missed else "ok"
        return f"{text} (bar {self.bar.sign} {self.bar.limit:g}) {verdict}"


@dataclass(frozen=True)
class Report:
    """A benchmark's tables, and its figures."""

    tables: list[Table] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)


def table(title: str, first: str, *columns: str) -> Table:
    """Return an empty table whose columns after the first hold numbers."""
    made = Table(title=title, title_justify="left")
    made.add_column(first)
    for column in columns:
        made.add_column(column, justify="right")
    return made
