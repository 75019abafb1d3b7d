"""Plain tables, state colours and bars that all renderings share."""

from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from services.cli.text import percent

Cell = str | Text | ProgressBar

_STYLES = {
    "READY": "green",
    "COMPLETED": "green",
    "FAILED": "bold red",
    "STOPPED": "dim",
    "CANCELLED": "dim",
    "STOPPING": "magenta",
    "PENDING": "yellow",
}
_ON_ITS_WAY = "cyan"


def new_table(*headers: str) -> Table:
    """Return a table without lines. A header that begins with ">" heads a column of figures:
    aligned to the right, and in one piece where the terminal is narrow and text is folded."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for header in headers:
        figures = header.startswith(">")
        table.add_column(
            Text(header.removeprefix(">")),
            justify="right" if figures else "left",
            overflow="fold",
            no_wrap=figures,
        )
    return table


def add_row(table: Table, *cells: Cell) -> None:
    """Add a row; strings are shown as they are, whatever brackets they hold."""
    table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells))


def state_text(state: str) -> Text:
    """Return a state's name in its colour."""
    return Text(state, style=_STYLES.get(state, _ON_ITS_WAY))


def bar(fraction: float, width: int = 16) -> ProgressBar:
    """Return a bar that is filled by `fraction`, 0 to 1; what is more counts as full."""
    # The theme's own colours all turn grey where a terminal has but sixteen.
    return ProgressBar(
        total=1.0,
        completed=min(1.0, max(0.0, fraction)),
        width=width,
        style="bright_black",
        complete_style="cyan",
        finished_style="green",
    )


def share(part: float, whole: float) -> str:
    """Return `part` as per cent of `whole`; "-" while the whole is unknown."""
    return percent(part / whole) if whole > 0 else "-"


def dim(text: str) -> Text:
    """Return text that stands back."""
    return Text(text, style="dim")
