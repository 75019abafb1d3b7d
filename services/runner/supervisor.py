"""Takes one shard through its life: download, child process, ring, weights, warm-up, end."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

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
    Load,
    Loaded,
    Ready,
    Run,
    WarmUp,
)
from services.runner.domain.plan import Action, View, missing_ranks, next_action, stall_limit
from services.runner.domain.ring import Rank, Ring
from services.runner.domain.state import ShardState
from services.runner.views import ShardView

logger = logging.getLogger(__name__)

_STOP_GRACE_SECONDS = 3.0
# When a rank's part of the ring breaks, the rank that caused it is known a little later.
_ROOT_CAUSE_SECONDS = 3.0
_SIBLINGS_END_SECONDS = 10.0
_DEATH_SECONDS = 1.0


class FileSource(Protocol):
    """Where a shard's files come from."""

    async def fetch(
        self,
        model_id: str,
        commit: str,
        layers: tuple[int, int],
        on_progress: Callable[[float], None],
    ) -> Path:
        """Return the folder that holds the files of layers [start, end)."""
        ...


class Sibling(Protocol):
    """Another rank's shard, on its own node."""

    async def follow(self, on_change: Callable[[ShardView], None]) -> None:
        """Report the shard at each change until it ended. Raises when its node is lost."""
        ...


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
    changes: Changes = field(default_factory=Changes)
    create_time: float = field(default_factory=time.time)
    on_event: Callable[[Event], None] = lambda _: None
    has_chat_template: bool = False

    def __post_init__(self) -> None:
        now = time.time()
        pending = ShardState.PENDING
        self.views = {r.rank: ShardView(r.rank, pending, now) for r in self.ring.ranks}
        self._folder: Path | None = None
        self._child: ChildProcess | None = None
        self._busy = False
        self._stopping = self._ending = False
        self._ended = asyncio.Event()
        self._suspect: ShardringError | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._main = asyncio.create_task(self._live(), name=f"shard {self.instance_id}")

    @property
    def mine(self) -> ShardView:
        """This rank's own shard."""
        return self.views[self.rank.rank]

    @property
    def ending(self) -> bool:
        """True from the moment it is clear that the shard will end."""
        return self._ending or self._stopping or self.mine.error is not None

    @property
    def error(self) -> ShardringError | None:
        """Why the instance failed, as far as this rank knows."""
        return next((view.error for view in self.views.values() if view.error), None)

    def run(self, request: Run) -> None:
        """Have the child work on a request. Raises ShardringError unless the shard is READY."""
        if self.mine.state is not ShardState.READY or self._child is None:
            raise not_ready(self.instance_id, self.mine.state, self.error)
        self._child.send(request)

    def send(self, command: Any) -> None:
        """Send the child a command that it takes at any time."""
        if self._child is not None:
            self._child.send(command)

    def fail(self, error: ShardringError) -> None:
        """Give up for this reason, unless the shard is ending already."""
        if not self._ending and self.mine.error is None:
            self._note(error=error)

    async def stop(self) -> None:
        """Stop, and return when the child is gone. Quiet when the shard already ended."""
        self._stopping = True
        self.changes.notify()
        await self._ended.wait()

    async def ended(self) -> None:
        """Return when the shard has ended."""
        await self._ended.wait()

    async def close(self) -> None:
        """After the end: stop watching the siblings."""
        self._main.cancel()
        await asyncio.gather(self._main, return_exceptions=True)

    async def _live(self) -> None:
        # The call that started the shard ends long before the shard does.
        deadline.set_remaining(None)
        followers = [self._spawn(self._follow(*item)) for item in self.siblings.items()]
        try:
            while not self.mine.state.ended:
                try:
                    await self._step()
                except Exception as error:
                    await self._end(ShardState.FAILED, known_error(error))
            self._ended.set()
            # Siblings end a moment later; what is listed of them should be how they ended.
            if followers:
                await asyncio.wait(followers, timeout=_SIBLINGS_END_SECONDS)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _step(self) -> None:
        changed = self.changes.next
        if self._stopping:
            return await self._end(ShardState.STOPPED)
        if self.mine.error is not None:
            return await self._end(ShardState.FAILED, self.mine.error)
        view = self._view()
        match next_action(view):
            case Action.FAIL:
                return await self._end(ShardState.FAILED, self._cause())
            case Action.STOP:
                return await self._end(ShardState.STOPPED)
            case Action.DOWNLOAD:
                return self._begin(ShardState.DOWNLOADING, self._download())
            case Action.CONNECT:
                child = await self._start_child()
                return self._begin(ShardState.CONNECTING, self._listen(child))
            case Action.LOAD:
                start, end = self.rank.layers
                self._begin(ShardState.LOADING)
                return self.send(Load(str(self._folder), start, end))
            case Action.WARM_UP:
                self._begin(ShardState.WARMING_UP)
                return self.send(WarmUp())
            case Action.WAIT if self._suspect is not None:
                try:
                    await asyncio.wait_for(changed.wait(), _ROOT_CAUSE_SECONDS)
                except TimeoutError:
                    self.fail(self._suspect)
            case Action.WAIT:
                limit = stall_limit(view)
                try:
                    await asyncio.wait_for(changed.wait(), limit)
                except TimeoutError:
                    self.fail(self._timeout(view, limit))
        return None

    def _view(self) -> View:
        others = {rank: v.state for rank, v in self.views.items() if rank != self.rank.rank}
        return View(
            rank=self.rank.rank,
            world_size=self.ring.world_size,
            state=self.mine.state,
            siblings=others,
            files_complete=self._folder is not None,
            busy=self._busy,
        )

    def _begin(self, state: ShardState, work: Coroutine[Any, Any, None] | None = None) -> None:
        """Enter a state whose work ends later, with `_busy` set back."""
        self._busy = True
        self._note(state=state)
        if work is not None:
            self._spawn(work)

    async def _download(self) -> None:
        def progress(fraction: float) -> None:
            self._note(download_fraction=fraction)

        ring = self.ring
        folder = await self.files.fetch(ring.model_id, ring.commit, self.rank.layers, progress)
        self._folder, self._busy = folder, False
        self._note(download_fraction=1.0)

    async def _start_child(self) -> ChildProcess:
        rank = self.rank
        self._child = child = await start_child(
            self.instance_id, rank.rank, rank.node_id, self.trace_context
        )
        logger.info("%s rank %d runs as process %d", self.instance_id, rank.rank, child.pid)
        child.send(Connect(rank.rank, rank.hosts))
        return child

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
            case Connected():
                self._busy = False
                self._note(state=ShardState.CONNECTED)
            case Loaded(memory_bytes=memory):
                self._busy = False
                self._note(state=ShardState.LOADED, memory_bytes=memory)
            case Ready(memory_bytes=memory, has_chat_template=has_chat_template):
                self._busy = False
                self.has_chat_template = has_chat_template
                self._note(state=ShardState.READY, memory_bytes=memory)
            case Failed(reason=reason, message=message):
                error = self._shard_error(message, Reason(reason))
                if self.ring.world_size == 1 or error.reason is not Reason.SHARD_FAILED:
                    self.fail(error)
                else:
                    self._suspect = error
                    self.changes.notify()
            case _:
                self.on_event(event)

    async def _follow(self, rank: int, sibling: Sibling) -> None:
        def take(view: ShardView) -> None:
            self.views[rank] = view
            self.changes.notify()

        try:
            await sibling.follow(take)
        except ShardringError as error:
            if error.reason is Reason.NODE_LOST:
                error.metadata |= {"rank": str(rank), "phase": self.views[rank].state.name}
            failed = replace(self.views[rank], state=ShardState.FAILED, memory_bytes=0)
            take(replace(failed, state_time=time.time(), error=error))

    async def _end(self, state: ShardState, error: ShardringError | None = None) -> None:
        """Release everything, then say so."""
        self._ending = True
        if state is ShardState.STOPPED:
            self._note(state=ShardState.STOPPING)
        else:
            logger.warning("%s rank %d failed: %s", self.instance_id, self.rank.rank, error)
        if self._child is not None:
            if state is ShardState.STOPPED:
                await self._child.stop(_STOP_GRACE_SECONDS)
            else:
                await self._child.kill()
        self._note(state=state, memory_bytes=0, error=error)

    def _note(self, **changed: Any) -> None:
        """Change this rank's own view and wake whoever watches it."""
        before = self.mine
        after = replace(before, **changed)
        if after.state is not before.state:
            after = replace(after, state_time=time.time())
        self.views[self.rank.rank] = after
        self.changes.notify()

    def _cause(self) -> ShardringError:
        """Return the error of the sibling that failed, naming it."""
        view = next(v for v in self.views.values() if v.state is ShardState.FAILED)
        return view.error or self._shard_error("it failed", rank=self.ring.ranks[view.rank])

    def _shard_error(
        self, why: str, reason: Reason = Reason.SHARD_FAILED, rank: Rank | None = None
    ) -> ShardringError:
        rank = rank or self.rank
        phase = self.views[rank.rank].state.name
        return ShardringError(
            reason,
            f"Rank {rank.rank} on node {rank.node_name} failed in {phase}: {why}",
            metadata={"rank": rank.rank, "node_id": rank.node_id, "phase": phase},
        )

    def _timeout(self, view: View, limit: float | None) -> ShardringError:
        missing = missing_ranks(view)
        names = ", ".join(f"{rank} on {self.ring.ranks[rank].node_name}" for rank in missing)
        return ShardringError(
            Reason.PHASE_TIMEOUT,
            f"Nothing moved for {limit:.0f} s while rank {view.rank} was {view.state.name}; "
            f"waiting for rank {names}.",
            metadata={
                "rank": view.rank,
                "phase": view.state.name,
                "limit_seconds": limit,
                "missing_ranks": ",".join(map(str, missing)),
            },
        )

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


def not_ready(instance_id: str, state: ShardState, error: ShardringError | None) -> ShardringError:
    """Return the error for a request to an instance that cannot take it now."""
    if state is ShardState.FAILED:
        why = f": {error.message}" if error else "."
        return ShardringError(
            Reason.INSTANCE_FAILED,
            f"Instance {instance_id} failed{why}",
            metadata={"instance_id": instance_id, **(error.metadata if error else {})},
        )
    ended = state >= ShardState.STOPPING
    return ShardringError(
        Reason.INSTANCE_NOT_READY,
        f"Instance {instance_id} {'has stopped' if ended else 'is still starting'} ({state.name}).",
        metadata={"instance_id": instance_id, "state": state.name},
        retry_delay_seconds=None if ended else 2,
    )
