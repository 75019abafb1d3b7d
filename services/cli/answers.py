"""Printing the answers to one question as they come."""

from collections.abc import AsyncIterator
from dataclasses import dataclass

from rich.console import Console

from services.cli.text import without_controls
from services.common.errors import Reason, ShardringError
from shardring.runner.v1 import instance_service_pb2, runner_pb2


@dataclass(frozen=True)
class Answered:
    """One answer: its figures, and its tokens' log-probabilities where asked for."""

    completion: runner_pb2.Completion
    logprobs: list[runner_pb2.ChosenLogprob]


async def stream_answers(
    parts: AsyncIterator[instance_service_pb2.GenerateResponse],
    console: Console,
    choice_count: int = 1,
) -> list[Answered]:
    """Print one answer's text as it comes, then a line end; return what came with it.

    Several answers come at the same time: the first is printed as it comes, each other one once
    those before it have ended, under a line that counts them. Errors of `parts` pass through.
    """
    completions: dict[int, runner_pb2.Completion] = {}
    logprobs: dict[int, list[runner_pb2.ChosenLogprob]] = {}
    page = _Page(console, choice_count)
    try:
        async for part in parts:
            index = part.choice_index
            if not 0 <= index < choice_count:
                raise ShardringError(Reason.INTERNAL, "The node sent an answer not asked for.")
            logprobs.setdefault(index, []).extend(part.logprobs)
            page.add(index, part.text)
            if part.HasField("completion"):
                completions[index] = part.completion
                page.end(index)
    finally:
        page.close()
    if len(completions) < choice_count:
        raise ShardringError(Reason.INTERNAL, "The node ended the answer without its figures.")
    return [Answered(completions[index], logprobs[index]) for index in range(choice_count)]


class _Page:
    """Answers one below the other; what comes too early waits."""

    def __init__(self, console: Console, count: int) -> None:
        self._console = console
        self._count = count
        self._waiting: dict[int, str] = {}
        self._ended: set[int] = set()
        # The answer that is being printed; its head was when its first text came.
        self._current = 0
        self._headed = False
        self._at_line_start = True

    def add(self, index: int, text: str) -> None:
        """Print text of the answer that is being printed, or keep it."""
        if index == self._current:
            self._print(text)
        else:
            self._waiting[index] = self._waiting.get(index, "") + text

    def end(self, index: int) -> None:
        """Go on to the next answers, once all before them have ended."""
        self._ended.add(index)
        while self._current in self._ended:
            self.close()
            self._current, self._headed = self._current + 1, False
            if self._current in self._waiting:
                self._print(self._waiting.pop(self._current))

    def close(self) -> None:
        """End the line."""
        if not self._at_line_start:
            self._console.out("")
            self._at_line_start = True

    def _print(self, text: str) -> None:
        if not self._headed and self._count > 1:
            self._console.out(f"[{self._current + 1} of {self._count}]", highlight=False)
        self._headed = True
        shown = without_controls(text) if self._console.is_terminal else text
        if shown:
            self._console.out(shown, end="", highlight=False)
            self._at_line_start = shown.endswith("\n")
