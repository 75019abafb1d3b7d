"""Takes one shard through its life: download, child process, ring, weights, warm-up, end."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import psutil

from services.common import deadline
from services.common.errors import Reason, ShardringError
from services.common.status import known_error
from services.runner.adapters.child import ChildProcess, start_child
from services.runner.changes import Changes
from services.runner.child_protocol import (
    Connect,
    Connected,
    Event,
    Failed,
    Finished,
    Load,
    Loaded,
    Ready,
    Refused,
    Run,
    Tokens,
    Usage,
    WarmUp,
    Working,
)
from services.runner.domain import faults
from services.runner.domain.plan import Action, View, next_action, stall_limit
from services.runner.domain.ring import Rank, Ring
from services.runner.domain.state import ShardState
from services.runner.ring_views import RingViews, Sibling
from services.runner.views import InstanceLoad, ShardUsage, ShardView

logger = logging.getLogger(__name__)

_STOP_GRACE_SECONDS = 3.0
# Where the placement set nothing aside for caches, they may take this part of what is free.
_CACHE_PART = 0.5
# When a rank's part of the ring breaks, the rank that caused it is known a little later.
_ROOT_CAUSE_SECONDS = 3.0
_SIBLINGS_END_SECONDS = 10.0
_DEATH_SECONDS = 1.0
# The ring is stuck when nothing comes of it for as many times the warm-up as this, or so long.
_STALL_STEPS = 20
_LEAST_STALL_SECONDS = 15.0


# Starts a child, given instance id, rank, node id and trace context.
ChildStarter = Callable[[str, int, str, dict[str, str]], Awaitable[ChildProcess]]


class FileSource(Protocol):
    """Where a shard's files come from."""

    async def fetch(
        self,
        instance_id: str,
        model_id: str,
        commit: str,
        layers: tuple[int, int],
        on_progress: Callable[[float], None],
    ) -> Path:
        """Return the folder that holds the files of layers [start, end).

        Cancelling says that the instance wants them no more.
        """
        ...

    async def close(self) -> None:
        """Let go of everything: the node stops."""
        ...


def free_memory() -> int:
    """Return the machine's free bytes: what shards may take where nobody knows better."""
    return int(psutil.virtual_memory().available)


@dataclass
class ShardSupervisor:
    """One rank of one instance on this node.

    `changes` tells when `views` differ. `on_event` is given what the child says of requests.
    """

    instance_id: str
    ring: Ring
    rank: Rank
    files: FileSource
    siblings: dict[int, Sibling]
    trace_context: dict[str, str]
    start_child: ChildStarter = start_child
    memory_left: Callable[[], int] = free_memory
    changes: Changes = field(default_factory=Changes)
    create_time: float = field(default_factory=time.time)
    on_event: Callable[[Event], None] = lambda _: None
    has_chat_template: bool = False
    # On the head: what the child last said of its work.
    load: InstanceLoad = field(default_factory=InstanceLoad)
    # On the head: when the ring last got something done, or was given work when it had none, and
    # how long a healthy one may take.
    last_progress: float = 0.0
    stall_seconds: float = 0.0

    def __post_init__(self) -> None:
        self._views = RingViews(self.ring, self.rank, self.changes)
        self._folder: Path | None = None
        self._fetching: asyncio.Task[None] | None = None
        self._child: ChildProcess | None = None
        self._busy = False
        self._stopping = self._ending = False
        self._ended = asyncio.Event()
        self._suspect: ShardringError | None = None
        self._suspect_until = 0.0
        # Of requests only the head is told; every rank's process says whether it works.
        self._requests_at_work: set[str] = set()
        self._working = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._main = asyncio.create_task(self._live(), name=f"shard {self.instance_id}")

    @property
    def views(self) -> dict[int, ShardView]:
        """Every rank's shard, as this rank knows it."""
        return self._views.by_rank

    @property
    def mine(self) -> ShardView:
        """This rank's own shard."""
        return self._views.mine

    @property
    def log_lines(self) -> tuple[str, ...]:
        """The last lines of this rank's process, now or at its end."""
        return self._child.log_lines if self._child is not None else ()

    @property
    def folder(self) -> Path | None:
        """Where this rank's files are, once they are complete."""
        return self._folder

    @property
    def generating(self) -> bool:
        """True while this rank, head or not, works on a request."""
        at_work = self._working or bool(self._requests_at_work)
        return at_work and not self.mine.state.ended

    @property
    def ending(self) -> bool:
        """True from the moment it is clear that the shard will end."""
        return self._ending or self._stopping or self.mine.error is not None

    @property
    def error(self) -> ShardringError | None:
        """Why the instance failed, as far as this rank knows."""
        return self._views.error

    def check_ready(self) -> None:
        """Raise ShardringError unless every rank is READY, as far as this one knows."""
        for view in (self.mine, *self.views.values()):
            if view.state is not ShardState.READY:
                raise faults.instance_not_ready(self.instance_id, view.state, self.error)

    def run(self, request: Run) -> None:
        """Have the child work on a request. Raises ShardringError unless the shard is READY."""
        if self.mine.state is not ShardState.READY or self._child is None:
            raise faults.instance_not_ready(self.instance_id, self.mine.state, self.error)
        if not self.generating:
            self.last_progress = time.monotonic()
        self._requests_at_work.add(request.request_id)
        self._child.send(request)

    def send(self, command: Any) -> None:
        """Send the child a command that it takes at any time."""
        if self._child is not None:
            self._child.send(command)

    def fail(self, error: ShardringError) -> None:
        """Give up for this reason, unless the shard is ending already."""
        if not self._ending and self.mine.error is None:
            self._views.note(error=error)

    async def stop(self) -> None:
        """Stop, and return when the child is gone. Quiet when the shard already ended."""
        self._stopping = True
        self.changes.notify()
        await self._ended.wait()

    async def ended(self) -> None:
        """Return when the shard has ended."""
        await self._ended.wait()

    @property
    def is_settled(self) -> bool:
        """True when every rank has ended, or was given up."""
        return self._main.done()

    async def settled(self) -> None:
        """Return when every rank has ended, or was given up."""
        await asyncio.wait([self._main])

    def note_stopped(self, rank: int) -> None:
        """Note that a sibling's node said that its shard is gone, or never was."""
        self._views.note_stopped(rank)

    async def close(self) -> None:
        """After the end: stop watching the siblings."""
        self._main.cancel()
        await asyncio.gather(self._main, return_exceptions=True)

    async def _live(self) -> None:
        # The call that started the shard ends long before the shard does.
        deadline.set_remaining(None)
        for rank, sibling in self.siblings.items():
            self._spawn(self._views.follow(rank, sibling))
        try:
            while not self.mine.state.ended:
                try:
                    await self._step()
                except Exception as error:
                    await self._end(ShardState.FAILED, known_error(error))
            self._ended.set()
            # Siblings end a moment later; what is listed of them should be how they ended.
            with suppress(TimeoutError):
                await asyncio.wait_for(self._views.all_ended(), _SIBLINGS_END_SECONDS)
        finally:
            self._ended.set()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._views.give_up()

    async def _step(self) -> None:
        changed = self.changes.next
        if self._stopping:
            return await self._end(ShardState.STOPPED)
        if self.mine.error is not None:
            return await self._end(ShardState.FAILED, self.mine.error)
        view = self._view()
        match next_action(view):
            case Action.FAIL:
                return await self._end(ShardState.FAILED, self._views.cause())
            case Action.STOP:
                return await self._end(ShardState.STOPPED)
            case Action.DOWNLOAD:
                self._begin(ShardState.DOWNLOADING)
                self._fetching = self._spawn(self._download())
                return None
            case Action.CONNECT:
                child = await self._start_child()
                return self._begin(ShardState.CONNECTING, self._listen(child))
            case Action.LOAD:
                start, end = self.rank.layers
                self._begin(ShardState.LOADING)
                return self.send(
                    Load(
                        str(self._folder),
                        start,
                        end,
                        self.ring.is_tensor,
                        self.rank.cache_bytes or int(self.memory_left() * _CACHE_PART),
                        self.ring.options.cache_bits,
                        self.ring.options.max_cache_tokens,
                    )
                )
            case Action.WARM_UP:
                self._begin(ShardState.WARMING_UP)
                return self.send(WarmUp())
            case Action.WAIT if self._suspect is not None:
                left = self._suspect_until - time.monotonic()
                try:
                    await asyncio.wait_for(changed.wait(), left)
                except TimeoutError:
                    self.fail(self._suspect)
            case Action.WAIT:
                limit = stall_limit(view)
                try:
                    await asyncio.wait_for(changed.wait(), limit)
                except TimeoutError:
                    self.fail(faults.phase_timeout(self.ring, view, limit or 0))
        return None

    def _view(self) -> View:
        return View(
            rank=self.rank.rank,
            world_size=self.ring.world_size,
            state=self.mine.state,
            siblings=self._views.others,
            files_complete=self._folder is not None,
            busy=self._busy,
        )

    def _begin(self, state: ShardState, work: Coroutine[Any, Any, None] | None = None) -> None:
        """Enter a state whose work ends later, with `_busy` set back."""
        self._busy = True
        self._views.note(state=state)
        if work is not None:
            self._spawn(work)

    async def _download(self) -> None:
        def progress(fraction: float) -> None:
            self._views.note(download_fraction=fraction)

        ring = self.ring
        folder = await self.files.fetch(
            self.instance_id, ring.model_id, ring.commit, self.rank.layers, progress
        )
        self._folder, self._busy = folder, False
        self._views.note(download_fraction=1.0)

    async def _start_child(self) -> ChildProcess:
        rank = self.rank
        self._child = child = await self.start_child(
            self.instance_id, rank.rank, rank.node_id, self.trace_context
        )
        logger.info("%s rank %d runs as process %d", self.instance_id, rank.rank, child.pid)
        child.send(Connect(rank.rank, rank.hosts))
        self._spawn(self._watch(child))
        return child

    async def _watch(self, child: ChildProcess) -> None:
        # The others would wait for it in the ring for ever, at full speed.
        if await child.halted():
            raise self._shard_error("its process was stopped by a signal")

    async def _listen(self, child: ChildProcess) -> None:
        async for event in child.events():
            self._take(event)
        # The stream ends with the child. When nobody asked for that, it died.
        if not self._ending and self._suspect is None:
            # Its own status is worth a moment: killing it right away would hide how it died.
            status = await child.ended(_DEATH_SECONDS)
            died = "was killed" if status < 0 else f"exited with status {status}"
            words = f": {child.last_words}" if child.last_words else ""
            raise self._shard_error(f"its process {died}{words}")

    def _take(self, event: Event) -> None:
        match event:
            case Connected() | Loaded() | Ready() | Usage() | Working() if self._ending:
                pass  # told too late: states only go forward
            case Connected():
                self._busy = False
                self._views.note(state=ShardState.CONNECTED)
            case Loaded(memory_bytes=memory):
                self._busy = False
                self._views.note(state=ShardState.LOADED, memory_bytes=memory)
            case Ready(memory_bytes=memory, has_chat_template=has_chat_template):
                self._busy = False
                self.has_chat_template = has_chat_template
                self.stall_seconds = max(_LEAST_STALL_SECONDS, _STALL_STEPS * event.step_seconds)
                self._views.note(state=ShardState.READY, memory_bytes=memory)
            case Failed(reason=reason, message=message):
                error = self._shard_error(message, Reason(reason))
                if self.ring.world_size == 1 or error.reason is not Reason.SHARD_FAILED:
                    self.fail(error)
                else:
                    self._suspect = error
                    self._suspect_until = time.monotonic() + _ROOT_CAUSE_SECONDS
                    self.changes.notify()
            case Usage():
                self._working = event.working
                self._views.note(
                    usage=ShardUsage(
                        event.busy_fraction,
                        event.cache_bytes,
                        event.cache_limit_bytes,
                        event.prefix_cache_bytes,
                    )
                )
            case Working():
                if event.step_count:
                    self.last_progress = time.monotonic()
                self.load = _load(event)
                self.changes.notify()
            case _:
                # Prompts are prepared and requests cancelled while the ring is stuck, too.
                if isinstance(event, Tokens):
                    self.last_progress = time.monotonic()
                elif isinstance(event, Finished | Refused):
                    self._requests_at_work.discard(event.request_id)
                self.on_event(event)

    async def _end(self, state: ShardState, error: ShardringError | None = None) -> None:
        """Release everything, then say so."""
        self._ending = True
        if self._fetching is not None:
            self._fetching.cancel()
        # One that is still on its way into the ring has nothing to flush, and cannot hear.
        graceful = state is ShardState.STOPPED and self.mine.state > ShardState.CONNECTING
        if state is ShardState.STOPPED:
            self._views.note(state=ShardState.STOPPING)
        else:
            logger.warning("%s rank %d failed: %s", self.instance_id, self.rank.rank, error)
        if self._child is not None:
            if graceful:
                await self._child.stop(_STOP_GRACE_SECONDS)
            else:
                await self._child.kill()
        self.load = InstanceLoad()
        self._views.note(
            state=state, memory_bytes=0, usage=None, log_lines=self.log_lines, error=error
        )

    def _shard_error(self, why: str, reason: Reason = Reason.SHARD_FAILED) -> ShardringError:
        return faults.shard_failed(self.rank, self.mine.state, why, reason)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        async def guarded() -> None:
            try:
                await work
            except Exception as error:
                self.fail(known_error(error))

        task = asyncio.create_task(guarded())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _load(told: Working) -> InstanceLoad:
    """Return what the head told; no rates once it is idle, for nothing follows that would tell."""
    if not (told.running_count or told.queued_count):
        return InstanceLoad()
    return InstanceLoad(
        running_count=told.running_count,
        queued_count=told.queued_count,
        prompt_tokens_per_second=told.prompt_tokens_per_second,
        completion_tokens_per_second=told.completion_tokens_per_second,
        batch_occupancy=told.batch_occupancy,
    )
