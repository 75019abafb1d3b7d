"""Rank 0: takes requests, issues the schedule's steps, and turns what comes back into answers."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from services.common.errors import Reason
from services.runner.child_protocol import (
    Cancel,
    Event,
    Finished,
    Refused,
    Run,
    Started,
    Tokens,
    Working,
)
from services.runner.domain.cache_room import CacheRoom
from services.runner.domain.request import Sampling
from services.runner.domain.schedule import Schedule
from services.runner.domain.steps import Command, Decode, Prefill, Sequence, Step
from services.runner.engine.answer import Answer, Ending
from services.runner.engine.inbox import Inbox
from services.runner.engine.line import Line
from services.runner.engine.sampling import PENALTY_TOKENS, ChosenToken, unpack
from services.runner.engine.text import Tokenizer
from services.runner.engine.work import REPORT_SECONDS, Work


@dataclass
class _Request:
    """One request on its way, and its moments (time.perf_counter)."""

    run: Run
    sequence: Sequence
    answer: Answer
    arrived: float
    started: float | None = None
    first: float | None = None
    count: int = 0
    logprobs: list[Any] = field(default_factory=list)


@dataclass
class _Counts:
    """What was done since the last report."""

    steps: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    decode_steps: int = 0


class Head:
    """Serves requests until something fails. `exact_alone`: requests that must be repeatable are
    not batched, as what this device computes depends on the batch."""

    def __init__(
        self,
        line: Line,
        work: Work,
        schedule: Schedule,
        room: CacheRoom,
        tokenizer: Tokenizer,
        send: Callable[[Event], None],
        *,
        exact_alone: bool,
    ) -> None:
        self._line, self._work, self._schedule = line, work, schedule
        self._room, self._tokenizer, self._send = room, tokenizer, send
        self._exact_alone = exact_alone
        self._requests: dict[int, _Request] = {}
        self._names: dict[str, int] = {}
        # Steps on their way, and which of their sequences want log-probabilities.
        self._issued: deque[tuple[Step, list[int | None]]] = deque()
        self._next_id = 0
        self._counts = _Counts()

    def serve(self, inbox: Inbox[Run | Cancel]) -> None:
        """Work on what comes. Raises what the ring or the model raise."""
        while True:
            for item in inbox.take():
                self._take(item)
            if not self.step(inbox.descriptor):
                self._report()  # once more: nothing is being done now
                if self._line.wait(inbox.descriptor, None):
                    raise RuntimeError("connection to a peer was lost")
                self._work.busy.read()  # the time it slept counts for nothing

    def step(self, wake: int | None) -> bool:
        """Do the next thing there is to do; False: there is none until a request comes.

        Returns early where `wake` can be read from.
        """
        if self._work.busy.seconds >= REPORT_SECONDS and self._is_working:
            self._report()
        if self._issued and not self._line.is_ahead and self._line.wait(None, 0):
            self._take_answer()
            return True
        step = self._schedule.next_step()
        if step is not None:
            self._issue(step)
            return True
        if self._issued:
            if self._line.wait(wake, REPORT_SECONDS):
                self._take_answer()
            return True
        return False

    @property
    def _is_working(self) -> bool:
        """True while there are requests, or steps that have not come back."""
        return bool(self._requests or self._issued)

    def _take(self, item: Run | Cancel) -> None:
        if isinstance(item, Run):
            self.submit(item)
        elif (known := self._names.get(item.request_id)) is not None:
            self._finish(self._requests[known], Ending("cancelled"), keep=False)

    def submit(self, run: Run) -> None:
        """Queue a request, or refuse it."""
        prompt = list(run.prompt_token_ids)
        wanted = run.max_token_count or self._tokenizer.room(len(prompt))
        allowed = min(wanted, self._tokenizer.room(len(prompt)))
        total = len(prompt) + allowed
        if not run.max_token_count:
            total = max(self._room.longest(total), len(prompt) + 1)
        if (short := self._room.shortage(total)) is not None:
            figures = {name: str(value) for name, value in asdict(short).items()}
            text = (
                f"{short.token_count} tokens, prompt and answer, need {short.needed_bytes:,} bytes "
                f"of key-value cache on rank {short.rank}, which may give "
                f"{short.limit_bytes:,}; shorten the prompt or ask for fewer tokens."
            )
            self._send(Refused(run.request_id, Reason.CACHE_TOO_SMALL, text, figures))
            return
        self._next_id += 1
        exact = self._exact_alone and run.sampling.repeatable
        sequence = Sequence(self._next_id, prompt, total, exact=exact)
        answer = Answer(self._tokenizer, run.stop, total - len(prompt))
        request = _Request(run, sequence, answer, time.perf_counter())
        self._requests[sequence.sequence_id] = request
        self._names[run.request_id] = sequence.sequence_id
        self._schedule.submit(sequence)

    # Steps out.

    def _issue(self, step: Step) -> None:
        commands = [self._with_details(command) for command in step.commands]
        wanted: list[int | None] = []
        match step:
            case Prefill(sequence=sequence, tokens=tokens):
                self._counts.prompt_tokens += len(tokens)
                self._line.prefill(commands, sequence.sequence_id, tokens)
            case Decode(lane_id=lane, sequences=sequences, tokens=chosen):
                self._counts.decode_steps += 1
                wanted = [self._wanted(sequence) for sequence in sequences]
                length = len(wanted) + sum(1 + 2 * count for count in wanted if count is not None)
                self._line.decode(commands, lane, chosen, length, len(sequences))
            case _:
                self._line.tidy(commands)
                return
        self._issued.append((step, wanted))

    def _wanted(self, sequence: Sequence) -> int | None:
        """Return how many likeliest tokens a sequence's answers carry; None: no probabilities."""
        return self._requests[sequence.sequence_id].run.top_logprob_count

    def _with_details(self, command: list[Any]) -> list[Any]:
        """Return a command as ranks need it: an OPEN with what its sampler and spans need."""
        if command[0] is not Command.OPEN:
            return command
        request = self._requests.get(command[1])
        if request is None:  # cancelled before it was issued: closed again by a command behind
            return [*command, details(Sampling(), [], None, {})]
        if request.started is None:
            request.started = time.perf_counter()
            self._send(Started(request.run.request_id))
        run = request.run
        told = details(run.sampling, request.sequence.tokens, run.top_logprob_count, run.trace)
        return [*command, told]

    # Answers in.

    def _take_answer(self) -> None:
        step, wanted = self._issued.popleft()
        numbers = self._line.take()
        self._counts.steps += 1
        if not isinstance(step, Decode):
            self._schedule.done(step, [])
            return
        chosen = unpack(numbers, wanted)
        pieces = []
        for sequence, place, token in self._schedule.done(step, [c.token_id for c in chosen]):
            request = self._requests[sequence.sequence_id]
            ending = self._add(request, chosen[place], token)
            if ending is None:
                ids, text = request.answer.take()
                if ids:
                    pieces.append(self._piece(request, ids, text))
            else:
                self._finish(request, ending, keep=True, before=pieces)
        if pieces:
            self._send(Tokens(tuple(pieces)))

    def _add(self, request: _Request, chosen: ChosenToken, token: int) -> Ending | None:
        if request.first is None:
            request.first = time.perf_counter()
        if chosen.logprob is not None:
            request.logprobs.append(self._logprob(chosen))
        self._counts.completion_tokens += 1
        return request.answer.add(token)

    def _piece(self, request: _Request, ids: tuple[int, ...], text: str) -> Any:
        request.count += len(ids)
        told = None
        if request.run.top_logprob_count is not None:
            told, request.logprobs = request.logprobs[: len(ids)], request.logprobs[len(ids) :]
        return (request.run.request_id, ids, text, told)

    def _logprob(self, chosen: ChosenToken) -> list[Any]:
        text = self._tokenizer.text_of
        top = [[token, text(token), logprob] for token, logprob in chosen.top]
        return [chosen.token_id, text(chosen.token_id), chosen.logprob, top]

    def _finish(
        self,
        request: _Request,
        ending: Ending,
        *,
        keep: bool,
        before: list[Any] | None = None,
    ) -> None:
        """End a request: send what came of it, and let go of its caches."""
        self._schedule.end(request.sequence, keep=keep)
        del self._requests[request.sequence.sequence_id]
        del self._names[request.run.request_id]
        ids, text = request.answer.take()
        rest = request.answer.finish()
        if before is not None:
            if ids:
                before.append(self._piece(request, ids, text))
                text = ""
            if before:
                self._send(Tokens(tuple(before)))
                before.clear()
        now = time.perf_counter()
        started = request.started or now
        first = request.first or now
        self._send(
            Finished(
                request.run.request_id,
                ending.finish_reason,
                text + rest,
                request.count,
                request.sequence.reused,
                started - request.arrived,
                first - started,
                now - first,
                ending.stop_text,
                ending.stop_token_id,
            )
        )

    def _report(self) -> None:
        seconds = self._work.busy.seconds
        counts = self._counts
        self._send(self._work.usage(working=self._is_working))
        self._send(
            Working(
                counts.steps,
                len(self._schedule.running),
                self._schedule.waiting_count,
                counts.prompt_tokens / seconds,
                counts.completion_tokens / seconds,
                counts.completion_tokens / max(1, counts.decode_steps),
            )
        )
        self._counts = _Counts()


def details(
    sampling: Sampling, tokens: list[int], top_logprob_count: int | None, trace: dict[str, str]
) -> dict[str, Any]:
    """Return what follows an OPEN's other values (see Work.apply)."""
    return {
        "sampling": asdict(sampling),
        "tokens": tokens[-PENALTY_TOKENS:],
        "position": len(tokens),
        "top_logprob_count": top_logprob_count,
        "trace": trace,
    }
