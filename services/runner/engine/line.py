"""How the head has a step computed: alone, stage by stage, or on all ranks at once."""

import json
import select
from collections.abc import Sequence
from typing import Any, Protocol

import mlx.core as mx

from services.runner.engine.ring import Op, Ring, Step
from services.runner.engine.work import Work

Commands = Sequence[list[Any]]


class Line(Protocol):
    """Takes steps, and gives their answers in the same order.

    `is_ahead`: steps are to be issued before answers are taken, where there are any.
    """

    is_ahead: bool

    def prefill(self, commands: Commands, sequence: int, tokens: list[int]) -> None:
        """Have part of a prompt computed."""
        ...

    def decode(
        self, commands: Commands, lane: int, tokens: list[int] | None, answer_length: int, size: int
    ) -> None:
        """Have the next token of each of a lane's `size` sequences chosen.

        `tokens` None: those that the lane's last step is choosing.
        """
        ...

    def tidy(self, commands: Commands) -> None:
        """Have commands carried out. There is no answer."""
        ...

    def take(self) -> list[int]:
        """Wait for the answer of the oldest step: what `choose` returned, nothing for prompts."""
        ...

    def wait(self, wake: int | None, seconds: float | None) -> bool:
        """Sleep until an answer is there (True), `wake` can be read, or `seconds` have passed."""
        ...


class Alone:
    """A ring of one: the whole model is here. May be a step ahead of its reader."""

    is_ahead = True

    def __init__(self, work: Work) -> None:
        self._work = work
        self._answers: list[mx.array | None] = []
        self._chosen: dict[int, mx.array] = {}

    def prefill(self, commands: Commands, sequence: int, tokens: list[int]) -> None:
        """See Line."""
        self._apply(commands)
        with self._work.busy.computing():
            self._work.prefill(sequence, mx.array([tokens]))
            self._work.tidy(prompt=True)
        self._answers.append(None)

    def decode(
        self, commands: Commands, lane: int, tokens: list[int] | None, answer_length: int, size: int
    ) -> None:
        """See Line."""
        self._apply(commands)
        with self._work.busy.computing():
            inputs = self._chosen[lane][:size] if tokens is None else mx.array(tokens)
            self._chosen[lane] = chosen = self._work.decode(lane, inputs[:, None])
            mx.async_eval(chosen)  # type: ignore[no-untyped-call]
            self._work.tidy(prompt=False)
        self._answers.append(chosen)

    def tidy(self, commands: Commands) -> None:
        """See Line."""
        self._apply(commands)

    def take(self) -> list[int]:
        """See Line."""
        with self._work.busy.computing():
            answer = self._answers.pop(0)
            numbers: Any = [] if answer is None else answer.tolist()
        return list(numbers)

    def wait(self, wake: int | None, seconds: float | None) -> bool:
        """See Line: an answer is there when a step was issued."""
        if self._answers:
            return True
        if wake is not None:
            select.select([wake], [], [], seconds)
        return False

    def _apply(self, commands: Commands) -> None:
        if not commands:
            return
        self._work.apply(commands)
        # Lanes that are gone leave nothing behind.
        held = self._work.lanes.lane_ids
        self._chosen = {lane: chosen for lane, chosen in self._chosen.items() if lane in held}


class _OnRing:
    """What rank 0 does alike on every ring of several."""

    is_ahead = False

    def __init__(self, work: Work, ring: Ring) -> None:
        self._work, self._ring = work, ring

    def tidy(self, commands: Commands) -> None:
        """See Line."""
        self._work.apply(commands)
        self._ring.send(Step(Op.TIDY, 0, encode(commands)))

    def wait(self, wake: int | None, seconds: float | None) -> bool:
        """See Line."""
        return -1 in self._ring.wait(seconds, *([] if wake is None else [wake]))


class Pipeline(_OnRing):
    """Rank 0 of a ring whose ranks hold layers of their own."""

    def __init__(self, work: Work, ring: Ring) -> None:
        super().__init__(work, ring)
        self._lengths: list[int] = []

    def prefill(self, commands: Commands, sequence: int, tokens: list[int]) -> None:
        """See Line."""
        with self._work.busy.computing():
            self._work.apply(commands)
            hidden = self._work.prefill(sequence, mx.array([tokens]))
            self._ring.send(Step(Op.PREFILL, sequence, encode(commands), hidden))
            self._work.tidy(prompt=True)
        self._lengths.append(0)

    def decode(
        self, commands: Commands, lane: int, tokens: list[int] | None, answer_length: int, size: int
    ) -> None:
        """See Line."""
        with self._work.busy.computing():
            self._work.apply(commands)
            hidden = self._work.decode(lane, _column(tokens))
            self._ring.send(Step(Op.DECODE, lane, encode(commands), hidden))
            self._work.tidy(prompt=False)
        self._lengths.append(answer_length)

    def take(self) -> list[int]:
        """See Line."""
        length = self._lengths.pop(0)
        numbers = self._ring.receive_answer(max(1, length))
        return numbers if length else []


class Split(_OnRing):
    """Rank 0 of a ring whose ranks hold a part of every layer; it alone chooses tokens.

    So a different rounding on another rank never lets the ranks part.
    """

    def __init__(self, work: Work, ring: Ring) -> None:
        super().__init__(work, ring)
        self._answers: list[list[int]] = []

    def prefill(self, commands: Commands, sequence: int, tokens: list[int]) -> None:
        """See Line."""
        inputs = mx.array([tokens], mx.int32)
        self._ring.send(Step(Op.PREFILL, sequence, encode(commands), inputs[..., None]))
        with self._work.busy.computing():
            self._work.apply(commands)
            self._work.prefill(sequence, inputs)
            self._work.tidy(prompt=True)
        self._answers.append([])

    def decode(
        self, commands: Commands, lane: int, tokens: list[int] | None, answer_length: int, size: int
    ) -> None:
        """See Line."""
        inputs = _column(tokens)
        self._ring.send(Step(Op.DECODE, lane, encode(commands), inputs[..., None]))
        with self._work.busy.computing():
            self._work.apply(commands)
            numbers: Any = self._work.decode(lane, inputs).tolist()
            self._work.tidy(prompt=False)
        self._answers.append(list(numbers))

    def take(self) -> list[int]:
        """See Line."""
        return self._answers.pop(0)

    def wait(self, wake: int | None, seconds: float | None) -> bool:
        """See Line: an answer is there when a step was issued. A neighbour that sends is gone."""
        return bool(self._answers) or super().wait(wake, seconds)


def _column(tokens: list[int] | None) -> mx.array:
    """Return tokens as int32 [B, 1]; a line that is never ahead is always told them."""
    assert tokens is not None
    return mx.array(tokens, mx.int32)[:, None]


def encode(commands: Commands) -> bytes:
    """Write commands for the other ranks; nothing where there are none."""
    return json.dumps(commands, separators=(",", ":")).encode() if commands else b""


def decode(text: bytes) -> Commands:
    """Read commands."""
    return list(json.loads(text)) if text else []
