"""The generation requests of one instance, on its head."""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from opentelemetry import trace
from opentelemetry.propagate import inject

from services.common import deadline
from services.common.errors import Reason, ShardringError
from services.common.status import known_error
from services.runner.child_protocol import (
    Cancel,
    Event,
    Finished,
    Prepare,
    Prepared,
    Refused,
    Run,
    Tokens,
)
from services.runner.domain import faults
from services.runner.domain.request import Input, Sampling
from services.runner.supervisor import ShardSupervisor

tracer = trace.get_tracer(__name__)

QUEUE_LIMIT = 64
# The longest a healthy ring may take for one step: a chunk of the prompt, or a token.
STEP_SECONDS = 120.0


@dataclass(frozen=True)
class Part:
    """Tokens that came, and the text that is certain with them."""

    token_ids: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class Completion:
    """The end of a generation. `finish_reason` is "stop" or "length"."""

    text: str
    finish_reason: str
    prompt_token_count: int
    completion_token_count: int
    queue_seconds: float
    prompt_seconds: float
    decode_seconds: float


@dataclass
class _Request:
    """One request on its way. `events` ends with None when the shard ends."""

    request_id: str
    events: asyncio.Queue[Event | None] = field(default_factory=asyncio.Queue)
    parts: asyncio.Queue[Part | Completion | ShardringError] = field(default_factory=asyncio.Queue)
    begun: bool = False
    running: bool = False
    abandoned: bool = False


class Requests:
    """Takes requests at any time, prepares each at once, and runs one after the other.

    `submit` hands a request to every other rank.
    """

    def __init__(self, shard: ShardSupervisor, submit: Callable[[Run], Awaitable[None]]) -> None:
        self._shard = shard
        self._submit = submit
        self._turn = asyncio.Lock()
        self._requests: dict[str, _Request] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        shard.on_event = self._take
        self._keep(self._end_with_shard())

    @property
    def count(self) -> int:
        """Requests that wait or run."""
        return len(self._requests)

    async def generate(
        self, given: Input, sampling: Sampling, max_token_count: int
    ) -> AsyncGenerator[Part | Completion, None]:
        """Yield parts, then one completion. Closing the iterator cancels the request.

        Raises ShardringError: what `Tokenizer.prepare` refuses, QUEUE_FULL, INSTANCE_NOT_READY,
        and INSTANCE_FAILED with the count of tokens already sent.
        """
        shard = self._shard
        shard.check_ready()
        if self.count >= QUEUE_LIMIT:
            raise ShardringError(
                Reason.QUEUE_FULL,
                f"{self.count} requests wait already; try again in a moment.",
                metadata={"queued_count": self.count, "queue_limit": QUEUE_LIMIT},
                retry_delay_seconds=1,
            )
        request = _Request(uuid.uuid4().hex)
        self._requests[request.request_id] = request
        # A task of its own: when the client goes away, the ring still has to be told and awaited.
        work = self._keep(self._work(request, given, sampling, max_token_count))
        work.add_done_callback(lambda _: self._requests.pop(request.request_id))
        sent = 0
        try:
            while True:
                part = await request.parts.get()
                if isinstance(part, ShardringError):
                    if part.reason is Reason.INSTANCE_FAILED:
                        part.metadata["sent_token_count"] = str(sent)
                    raise part
                if isinstance(part, Part):
                    sent += len(part.token_ids)
                yield part
                if isinstance(part, Completion):
                    return
        finally:
            request.abandoned = True
            if request.running:
                shard.send(Cancel(request.request_id))
            elif not request.begun:
                work.cancel()

    def _keep(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _take(self, event: Event) -> None:
        request = self._requests.get(getattr(event, "request_id", ""))
        if request is not None:
            request.events.put_nowait(event)

    async def _end_with_shard(self) -> None:
        await self._shard.ended()
        for request in self._requests.values():
            request.events.put_nowait(None)

    async def _work(
        self, request: _Request, given: Input, sampling: Sampling, max_token_count: int
    ) -> None:
        # Once begun, the ring is told in full, however little time the client has left.
        deadline.set_remaining(None)
        try:
            prompt = await self._prepare(request, given)
            queued = time.perf_counter()
            with tracer.start_as_current_span("queue"):
                await self._turn.acquire()
            request.begun = True
            try:
                waited = time.perf_counter() - queued
                run = Run(request.request_id, prompt, sampling, max_token_count, _trace_context())
                finished = await self._run(request, run)
            finally:
                self._turn.release()
            request.parts.put_nowait(
                Completion(
                    text=finished.text,
                    finish_reason=finished.finish_reason,
                    prompt_token_count=len(prompt),
                    completion_token_count=finished.completion_token_count,
                    queue_seconds=waited,
                    prompt_seconds=finished.prompt_seconds,
                    decode_seconds=finished.decode_seconds,
                )
            )
        except Exception as error:
            request.parts.put_nowait(known_error(error))

    async def _prepare(self, request: _Request, given: Input) -> tuple[int, ...]:
        self._shard.send(Prepare(request.request_id, given))
        event = await self._next(request)
        if isinstance(event, Refused):
            raise ShardringError(Reason(event.reason), event.message, metadata={**event.metadata})
        assert isinstance(event, Prepared)
        return event.token_ids

    async def _run(self, request: _Request, run: Run) -> Finished:
        try:
            await self._submit(run)
        except ShardringError as error:
            # Some ranks may be waiting in the ring by now, and nobody will come.
            self._shard.fail(error)
            await self._shard.ended()
        self._shard.run(run)
        request.running = True
        if request.abandoned:
            self._shard.send(Cancel(request.request_id))
        try:
            while not isinstance(event := await self._next(request), Finished):
                if isinstance(event, Tokens):
                    request.parts.put_nowait(Part(event.token_ids, event.text))
        finally:
            request.running = False
        return event

    async def _next(self, request: _Request) -> Event:
        """Return the child's next word on a request. Raises when the shard ends before."""
        shard = self._shard
        try:
            async with asyncio.timeout(STEP_SECONDS):
                event = await request.events.get()
        except TimeoutError:
            shard.fail(faults.request_stuck(shard.rank, STEP_SECONDS))
            await shard.ended()
            event = None
        if event is None:
            raise faults.instance_not_ready(shard.instance_id, shard.mine.state, shard.error)
        return event


def _trace_context() -> dict[str, str]:
    carrier: dict[str, str] = {}
    inject(carrier)
    return carrier
