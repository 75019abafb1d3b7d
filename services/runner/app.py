"""What the runner of one node does: starts, shows, stops instances, and answers requests."""

import asyncio
import logging
import re
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import aclosing, suppress
from contextvars import Context
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from services.common import deadline
from services.common.errors import Reason, ShardringError, invalid_field
from services.common.telemetry import trace_headers
from services.runner.adapters.child import start_child
from services.runner.adapters.ports import check_port_free
from services.runner.adapters.sibling import RemoteSibling
from services.runner.changes import Changes
from services.runner.domain import faults
from services.runner.domain.request import GenerationRequest, check_request
from services.runner.domain.ring import Ring, check_ring
from services.runner.domain.state import ShardState
from services.runner.requests import Completion, Part, Requests
from services.runner.supervisor import ChildStarter, FileSource, ShardSupervisor, free_memory
from services.runner.views import InstanceView

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_INSTANCE_ID = re.compile(r"[a-z0-9-]{1,64}")
_END_SECONDS = 5.0
_ENDED_KEPT_SECONDS = 3600.0
_ENDED_KEPT_COUNT = 100


@dataclass
class _Instance:
    """One instance this node has a shard of."""

    run_id: str
    shard: ShardSupervisor
    siblings: dict[int, RemoteSibling]
    requests: Requests
    mlx_engine_port: int = 0

    async def retire(self) -> None:
        """Follow the instance to its end, then let go of the connections that this took."""
        try:
            await self.shard.settled()
        finally:
            await self.shard.close()
            await asyncio.gather(*(sibling.close() for sibling in self.siblings.values()))
            # A closed channel keeps its connections for as long as anything refers to it.
            self.siblings.clear()
            self.shard.siblings.clear()

    async def stop(self) -> None:
        """Stop every shard; return when this node's is gone and the others have answered."""
        if self.shard.is_settled:
            return
        ranks = list(self.siblings)
        stops = (self.siblings[rank].stop() for rank in ranks)
        outcomes = await asyncio.gather(self.shard.stop(), *stops, return_exceptions=True)
        for rank, outcome in zip(ranks, outcomes[1:], strict=True):
            if isinstance(outcome, BaseException):
                # It sees this rank end, and stops too.
                logger.warning("Stopping %s: %s", self.shard.instance_id, outcome)
            else:
                self.shard.note_stopped(rank)


class Runner:
    """The instances of one node."""

    def __init__(
        self, node_id: str, files: FileSource, start_child: ChildStarter = start_child
    ) -> None:
        self.node_id = node_id
        self._files = files
        self._start_child = start_child
        self._instances: dict[str, _Instance] = {}
        self._starts: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closing = False
        # Answers what memory shards may still take; the node knows its owner's rules.
        self.memory_left: Callable[[], int] = free_memory
        # Tells when `idle` may have changed.
        self.changes = Changes()
        # Given the id and the run id of each instance that this node comes to head, does what is
        # to be done for it until it has ended.
        self.on_head: Callable[[str, str], Coroutine[Any, Any, None]] | None = None

    @property
    def idle(self) -> bool:
        """True while no shard lives on this node."""
        return next(self._live(), None) is None

    async def start_instance(self, instance_id: str, ring: Ring) -> InstanceView:
        """Start every shard of a ring whose head is this node; all ranks accept, or none runs on.

        Raises ShardringError as StartInstance documents.
        """
        check_ring(ring)
        if ring.head.node_id != self.node_id:
            raise faults.not_head(instance_id, ring)
        _check_id(instance_id)
        # In a task of its own: a caller that goes away must not leave half of the ring told.
        return await asyncio.shield(self._keep(self._start_all(instance_id, ring)))

    async def _start_all(self, instance_id: str, ring: Ring) -> InstanceView:
        deadline.set_remaining(None)
        async with self._starts.setdefault(instance_id, asyncio.Lock()):
            held = self._instances.get(instance_id)
            if held is not None and held.shard.ring == ring and not held.shard.ending:
                return _view(held)
            if held is not None and held.shard.ending:
                # The other ranks of the earlier start end a moment later.
                await asyncio.wait(
                    [asyncio.ensure_future(held.shard.settled())], timeout=_END_SECONDS
                )
            run_id = uuid.uuid4().hex
            await self.start_shard(instance_id, ring, 0, run_id)
            instance = self._instances[instance_id]
            results = await asyncio.gather(
                *(sibling.start(ring) for sibling in instance.siblings.values()),
                return_exceptions=True,
            )
            refusals = [result for result in results if isinstance(result, BaseException)]
            # A rank may have been told after the instance was stopped already.
            if refusals or instance.shard.ending:
                await instance.stop()
            if refusals:
                raise refusals[0]
            return _view(instance)

    async def start_shard(self, instance_id: str, ring: Ring, rank: int, run_id: str) -> None:
        """Accept one rank of a ring. The same again while it lives changes nothing.

        `run_id` names this start of the instance among earlier ones.

        Raises ShardringError as StartShard documents.
        """
        _check_id(instance_id)
        check_ring(ring)
        if not 0 <= rank < ring.world_size:
            raise invalid_field("rank", rank, f"0 to {ring.world_size - 1}")
        assigned = ring.ranks[rank]
        if assigned.node_id != self.node_id:
            raise faults.wrong_node(assigned, self.node_id)
        held = self._instances.get(instance_id)
        if held is not None and held.run_id != run_id and held.shard.ending:
            with suppress(TimeoutError):
                await asyncio.wait_for(held.shard.ended(), _END_SECONDS)
            held = self._instances.get(instance_id)
        # From here on nothing is awaited, so that of two starts at once one finds the other.
        if self._closing:
            raise ShardringError(Reason.SHUTTING_DOWN, "This node is stopping.")
        if held is not None:
            if (held.run_id, held.shard.ring, held.shard.rank.rank) == (run_id, ring, rank):
                return
            if not held.shard.mine.state.ended:
                raise faults.instance_exists(instance_id)
        for shard in self._live():
            if assigned.ring_port is not None and shard.rank.ring_port == assigned.ring_port:
                raise faults.ring_port_in_use(assigned)
        check_port_free(assigned)
        self._forget_old()
        siblings = {
            other.rank: RemoteSibling(instance_id, run_id, other) for other in ring.others(rank)
        }
        shard = ShardSupervisor(
            instance_id,
            ring,
            assigned,
            self._files,
            {**siblings},
            trace_headers(),
            self._start_child,
            memory_left=self.memory_left,
        )

        instance = _Instance(run_id, shard, siblings, Requests(shard))
        self._instances[instance_id] = instance
        self._keep(self._retire(instance))
        if rank == 0 and self.on_head is not None:
            # Outlives the call that starts the instance, and is no part of its trace.
            self._keep(self.on_head(instance_id, run_id), Context())
        self.changes.notify()

    async def _retire(self, instance: _Instance) -> None:
        try:
            await instance.retire()
        finally:
            self.changes.notify()

    def get(self, instance_id: str) -> InstanceView:
        """Return one instance. Raises ShardringError(INSTANCE_NOT_FOUND)."""
        return _view(self._find(instance_id))

    def list(self) -> list[InstanceView]:
        """Return all instances, newest first."""
        # A copy: metrics ask from a thread of their own.
        views = [_view(instance) for instance in list(self._instances.values())]
        return sorted(views, key=lambda view: (-view.create_time, view.instance_id))

    def model_folder(self, instance_id: str) -> Path:
        """Return where this node has an instance's files. Raises ShardringError unless it has."""
        shard = self._find(instance_id).shard
        if shard.folder is None:
            raise faults.instance_not_ready(instance_id, shard.mine.state, shard.error)
        return shard.folder

    def note_mlx_engine_port(self, instance_id: str, run_id: str, port: int) -> None:
        """Note where a start of an instance is served as MlxEngine; 0: nowhere."""
        instance = self._instances.get(instance_id)
        if instance is not None and instance.run_id == run_id:
            instance.mlx_engine_port = port
            instance.shard.changes.notify()

    async def watch(self, instance_id: str, run_id: str = "") -> AsyncGenerator[InstanceView, None]:
        """Yield an instance as it is and at each change, until all its shards have ended.

        With `run_id`, another start of the instance counts as none.
        """
        instance = self._find(instance_id, run_id)
        while True:
            changed = instance.shard.changes.next
            view = _view(instance)
            yield view
            # As it was shown: while that was sent, more may have come to be shown.
            if all(shard.state.ended for shard in view.shards):
                return
            await changed.wait()

    async def stop_shard(self, instance_id: str, run_id: str) -> None:
        """Stop this node's shard; return when it is gone. Quiet when there is none."""
        held = self._instances.get(instance_id)
        if held is not None and held.run_id == run_id:
            await held.shard.stop()

    async def stop_instance(self, instance_id: str) -> InstanceView:
        """Stop every shard; return when this node's is gone.

        A sibling that cannot be reached sees this one end, and stops too.
        """
        instance = self._find(instance_id)
        await instance.stop()
        return _view(instance)

    async def generate(
        self, instance_id: str, request: GenerationRequest
    ) -> AsyncGenerator[Part | Completion, None]:
        """Yield the parts of one generation, then its completions. Closing cancels.

        Raises ShardringError as Generate documents.
        """
        instance = self._find(instance_id)
        if instance.shard.rank.rank != 0:
            raise faults.not_head(instance_id, instance.shard.ring)
        check_request(request)
        async with aclosing(instance.requests.generate(request)) as parts:
            async for part in parts:
                yield part

    def reserved_bytes(self) -> int:
        """Return the memory promised to live shards, taken or not."""
        return sum(shard.rank.promised_bytes for shard in self._live())

    def loaded_bytes(self) -> int:
        """Return how much of that they hold by now."""
        return sum(min(s.rank.promised_bytes, s.mine.memory_bytes) for s in self._live())

    def generating(self) -> bool:
        """Say whether a request is being worked on by any shard of this node, head or not."""
        return any(shard.generating for shard in self._live())

    def models_in_use(self) -> dict[str, str]:
        """Return the models of live shards, each with an instance that runs it."""
        return {shard.ring.model_id: shard.instance_id for shard in self._live()}

    def _live(self) -> Iterator[ShardSupervisor]:
        for instance in self._instances.values():
            if not instance.shard.mine.state.ended:
                yield instance.shard

    async def close(self, why: str) -> None:
        """End all shards, and start no more; their siblings elsewhere fail, naming this node."""
        self._closing = True
        for instance in self._instances.values():
            shard = instance.shard
            shard.fail(faults.node_lost(shard.rank, shard.mine.state, why))
        await asyncio.gather(*(i.shard.ended() for i in self._instances.values()))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._files.close()

    def _keep(
        self, work: Coroutine[Any, Any, Result], context: Context | None = None
    ) -> asyncio.Task[Result]:
        task = asyncio.create_task(work, context=context)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _find(self, instance_id: str, run_id: str = "") -> _Instance:
        instance = self._instances.get(instance_id)
        if instance is None or run_id not in ("", instance.run_id):
            raise faults.instance_not_found(instance_id)
        return instance

    def _forget_old(self) -> None:
        now = time.time()
        ended = [
            (instance.shard.mine.state_time, instance_id)
            for instance_id, instance in self._instances.items()
            if instance.shard.mine.state.ended
        ]
        ended.sort(reverse=True)
        for index, (end_time, instance_id) in enumerate(ended):
            if index >= _ENDED_KEPT_COUNT or now - end_time > _ENDED_KEPT_SECONDS:
                del self._instances[instance_id]


def random_seed() -> int:
    """Return a seed for a request that brings none."""
    return secrets.randbits(63)


def _check_id(instance_id: str) -> None:
    if not _INSTANCE_ID.fullmatch(instance_id):
        raise faults.bad_instance_id(instance_id)


def _view(instance: _Instance) -> InstanceView:
    shard = instance.shard
    at_work = shard.rank.rank == 0 and shard.mine.state is ShardState.READY
    views = shard.views | {shard.rank.rank: replace(shard.mine, log_lines=shard.log_lines)}
    return InstanceView(
        instance_id=shard.instance_id,
        ring=shard.ring,
        rank=shard.rank.rank,
        shards=tuple(view for _, view in sorted(views.items())),
        create_time=shard.create_time,
        request_count=instance.requests.count,
        has_chat_template=shard.has_chat_template,
        mlx_engine_port=instance.mlx_engine_port,
        load=shard.load if at_work else None,
    )
