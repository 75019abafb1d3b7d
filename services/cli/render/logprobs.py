"""Log-probabilities of an answer's tokens."""

import math
from collections.abc import Sequence

from rich.table import Table

from services.cli.render.tables import add_row, new_table
from services.cli.text import quoted
from shardring.runner.v1 import runner_pb2


def logprobs_table(logprobs: Sequence[runner_pb2.ChosenLogprob]) -> Table:
    """Return one row a token: its text, its log-probability and probability, and the likeliest."""
    has_top = any(one.top for one in logprobs)
    table = new_table("TOKEN", ">LOGPROB", ">CHANCE", *(["LIKELIEST"] if has_top else []))
    for one in logprobs:
        top = ", ".join(f"{quoted(other.text)} {_chance(other)}" for other in one.top)
        cells = [quoted(one.chosen.text), f"{one.chosen.logprob:.3f}", _chance(one.chosen)]
        add_row(table, *cells, *([top] if has_top else []))
    return table


def _chance(token: runner_pb2.TokenLogprob) -> str:
    return f"{100 * math.exp(min(0.0, token.logprob)):.1f} %"
