"""The generation requests of one instance, on its head."""

import asyncio
import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Coroutine
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from opentelemetry import trace
from opentelemetry.trace import Span

from services.common.errors import Reason, ShardringError
from services.common.telemetry import trace_headers
from services.runner.child_protocol import (
    Cancel,
    Event,
    Finished,
    Prepare,
    Prepared,
    Refused,
    Run,
    Started,
    Tokens,
)
from services.runner.domain import faults
from services.runner.domain.request import ChosenLogprob, GenerationRequest, TokenLogprob
from services.runner.metrics import Metrics
from services.runner.supervisor import ShardSupervisor

tracer = trace.get_tracer(__name__)

# Answers that wait or are computed.
QUEUE_LIMIT = 128
# Put together for a client that is behind. With all log-probabilities it stays far below the 4 MB
# that gRPC clients take unless told otherwise.
_MERGED_PARTS = 512


@dataclass(frozen=True)
class Part:
    """Tokens that came, and the text that is certain with them. `logprobs`: where asked for, one
    for each token."""

    token_ids: tuple[int, ...]
    text: str
    choice_index: int = 0
    logprobs: tuple[ChosenLogprob, ...] | None = None


@dataclass(frozen=True)
class Completion:
    """The end of a choice. `finish_reason` is "stop" or "length"; `stop_text` or `stop_token_id`
    is the one of the request's own that ended it."""

    text: str
    finish_reason: str
    prompt_token_count: int
    completion_token_count: int
    cached_token_count: int
    queue_seconds: float
    prompt_seconds: float
    decode_seconds: float
    choice_index: int = 0
    stop_text: str | None = None
    stop_token_id: int | None = None


@dataclass(eq=False)
class _Call:
    """One call of Generate on its way. `items` are what its client is still to be given."""

    is_chat: bool
    arrived: float = field(default_factory=time.perf_counter)
    items: deque[Part | Completion | ShardringError] = field(default_factory=deque)
    came: asyncio.Event = field(default_factory=asyncio.Event)
    prompt_token_count: int = 0
    sent: int = 0
    # Choices the child works on.
    open_count: int = 0

    def give(self, item: Part | Completion | ShardringError) -> None:
        """Have the client given an item."""
        self.items.append(item)
        self.came.set()


@dataclass(eq=False)
class _Choice:
    """One answer of a call."""

    call: _Call
    index: int
    queue: Span | None


class Requests:
    """Hands requests to the child, and what it says of them to the clients."""

    def __init__(self, shard: ShardSupervisor) -> None:
        self._shard = shard
        self._metrics = Metrics(shard.ring.model_id, shard.instance_id)
        self._calls: set[_Call] = set()
        self._choices: dict[str, _Choice] = {}
        self._preparing: dict[str, asyncio.Future[Prepared]] = {}
        # Choices whose prompts are being prepared.
        self._to_come = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._watching: asyncio.Task[None] | None = None
        shard.on_event = self._take
        self._keep(self._end_with_shard())

    @property
    def count(self) -> int:
        """Requests that wait or run."""
        return len(self._calls)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Part | Completion, None]:
        """Yield parts, then one completion a choice. Closing the iterator cancels.

        Raises ShardringError: what `Tokenizer.prepare` refuses, QUEUE_FULL, CACHE_TOO_SMALL,
        INSTANCE_NOT_READY, and INSTANCE_FAILED with the count of tokens already sent.
        """
        self._shard.check_ready()
        waiting = len(self._choices) + self._to_come
        if waiting + request.choice_count > QUEUE_LIMIT:
            raise ShardringError(
                Reason.QUEUE_FULL,
                f"{waiting} answers wait or are computed already; try again in a moment.",
                metadata={"queued_count": waiting, "queue_limit": QUEUE_LIMIT},
                retry_delay_seconds=1,
            )
        call = _Call(is_chat=request.input.messages is not None)
        self._calls.add(call)
        names: list[str] = []
        try:
            names = await self._start(call, request)
            left = request.choice_count
            while left:
                await call.came.wait()
                for item in _merged(call):
                    if isinstance(item, ShardringError):
                        raise self._told(item, call)
                    if isinstance(item, Part):
                        call.sent += len(item.token_ids)
                    else:
                        left -= 1
                    yield item
        except ShardringError as error:
            self._metrics.request_ended(
                error_type=error.reason,
                is_chat=call.is_chat,
                duration_s=time.perf_counter() - call.arrived,
            )
            raise
        finally:
            for name in names:
                if name in self._choices:
                    self._shard.send(Cancel(name))
            if not call.open_count:
                self._calls.discard(call)

    async def _start(self, call: _Call, request: GenerationRequest) -> list[str]:
        """Have the child work on every choice; return their names."""
        name = uuid.uuid4().hex
        self._preparing[name] = future = asyncio.get_running_loop().create_future()
        self._to_come += request.choice_count
        try:
            self._shard.send(Prepare(name, request))
            prepared = await future
        finally:
            self._to_come -= request.choice_count
            del self._preparing[name]
        call.prompt_token_count = len(prepared.token_ids)
        names = [f"{name}-{index}" for index in range(request.choice_count)]
        for index, choice_name in enumerate(names):
            seed = (request.sampling.seed + index) % 2**63
            self._shard.run(
                Run(
                    choice_name,
                    prepared.token_ids,
                    replace(request.sampling, seed=seed),
                    request.stop,
                    request.max_token_count,
                    request.top_logprob_count,
                    trace_headers(),
                )
            )
            self._choices[choice_name] = _Choice(call, index, tracer.start_span("queue"))
            call.open_count += 1
        self._watch()
        return names

    def _watch(self) -> None:
        """Have progress watched for as long as there is work."""
        if self._watching is None or self._watching.done():
            self._watching = self._keep(self._watch_progress())

    async def _watch_progress(self) -> None:
        """Fail the instance when a step takes far longer than any should.

        Steps, not requests: those end when their clients lose patience, which mends nothing.
        """
        shard, limit = self._shard, self._shard.stall_seconds
        while shard.generating:
            silent = time.monotonic() - shard.last_progress
            if silent >= limit:
                shard.fail(faults.request_stuck(shard.rank, limit))
                return
            await asyncio.sleep(limit - silent)

    def _keep(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _take(self, event: Event) -> None:
        match event:
            case Tokens(pieces=pieces):
                for name, ids, text, logprobs in pieces:
                    # A client that has gone may still be sent what was on its way.
                    if (choice := self._choices.get(name)) is not None:
                        told = None if logprobs is None else tuple(map(_logprob, logprobs))
                        choice.call.give(Part(tuple(ids), text, choice.index, told))
            case Prepared():
                if (future := self._preparing.get(event.request_id)) and not future.done():
                    future.set_result(event)
            case Started():
                self._end_queue(self._choices.get(event.request_id))
            case Finished():
                # None: told when all had been told already that the instance ended.
                if (ended := self._choices.pop(event.request_id, None)) is not None:
                    self._finish(ended, event)
            case Refused():
                self._refuse(event)
            case _:
                raise ValueError(f"unexpected {event}")

    def _refuse(self, event: Refused) -> None:
        error = ShardringError(Reason(event.reason), event.message, metadata={**event.metadata})
        if (future := self._preparing.get(event.request_id)) is not None:
            if not future.done():
                future.set_exception(error)
        elif (choice := self._choices.pop(event.request_id, None)) is not None:
            self._end_queue(choice)
            self._close(choice.call)
            choice.call.give(error)

    def _finish(self, choice: _Choice, event: Finished) -> None:
        call = choice.call
        self._end_queue(choice)
        self._close(call)
        self._metrics.request_ended(
            finish_reason=event.finish_reason,
            is_chat=call.is_chat,
            prompt_tokens=call.prompt_token_count,
            cached_tokens=event.cached_token_count,
            completion_tokens=event.completion_token_count,
            queue_s=event.queue_seconds,
            time_to_first_token_s=(
                event.queue_seconds + event.prompt_seconds if event.completion_token_count else None
            ),
            decode_s=event.decode_seconds,
        )
        call.give(
            Completion(
                text=event.text,
                finish_reason=event.finish_reason,
                prompt_token_count=call.prompt_token_count,
                completion_token_count=event.completion_token_count,
                cached_token_count=event.cached_token_count,
                queue_seconds=event.queue_seconds,
                prompt_seconds=event.prompt_seconds,
                decode_seconds=event.decode_seconds,
                choice_index=choice.index,
                stop_text=event.stop_text,
                stop_token_id=event.stop_token_id,
            )
        )

    def _close(self, call: _Call) -> None:
        call.open_count -= 1
        if not call.open_count:
            self._calls.discard(call)

    @staticmethod
    def _end_queue(choice: _Choice | None) -> None:
        if choice is not None and choice.queue is not None:
            choice.queue.end()
            choice.queue = None

    async def _end_with_shard(self) -> None:
        await self._shard.ended()
        shard = self._shard
        if self._watching is not None:
            self._watching.cancel()
        error = faults.instance_not_ready(shard.instance_id, shard.mine.state, shard.error)
        for future in self._preparing.values():
            if not future.done():
                future.set_exception(error.bare())
        for choice in self._choices.values():
            self._end_queue(choice)
            choice.call.open_count = 0
            choice.call.give(error)
        self._choices.clear()
        self._calls.clear()

    @staticmethod
    def _told(error: ShardringError, call: _Call) -> ShardringError:
        """Return the error as its own client gets it: with what was sent before."""
        told = error.bare()
        if told.reason is Reason.INSTANCE_FAILED:
            told.metadata["sent_token_count"] = str(call.sent)
        return told


def _merged(call: _Call) -> list[Part | Completion | ShardringError]:
    """Take what is there for a client, a choice's neighbouring parts put together.

    So a client that is slower than the ring gets fewer, longer messages.
    """
    call.came.clear()
    groups: list[list[Any]] = []
    parts: dict[int, list[Any]] = {}
    while call.items:
        item = call.items.popleft()
        if isinstance(item, Part):
            group = parts.get(item.choice_index)
            if group is not None and len(group) < _MERGED_PARTS:
                group.append(item)
                continue
            parts[item.choice_index] = group = [item]
        else:
            group = [item]
        groups.append(group)
    return [group[0] if len(group) == 1 else _joined(group) for group in groups]


def _joined(parts: list[Part]) -> Part:
    first = parts[0]
    return Part(
        tuple(chain.from_iterable(part.token_ids for part in parts)),
        "".join(part.text for part in parts),
        first.choice_index,
        None
        if first.logprobs is None
        else tuple(chain.from_iterable(part.logprobs or () for part in parts)),
    )


def _logprob(told: list[Any]) -> ChosenLogprob:
    token, text, logprob, top = told
    return ChosenLogprob(
        TokenLogprob(token, text, logprob), tuple(TokenLogprob(*one) for one in top)
    )
