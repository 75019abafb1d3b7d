"""What the runner of one node does: starts, shows, stops instances, and answers requests."""

import asyncio
import logging
import re
import secrets
import socket
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

from opentelemetry.propagate import inject

from services.common.addresses import parse_host_port
from services.common.errors import Reason, ShardringError, invalid_field
from services.runner.adapters.sibling import RemoteSibling
from services.runner.child_protocol import Run
from services.runner.domain.request import (
    Input,
    Sampling,
    check_input,
    check_max_token_count,
    check_sampling,
)
from services.runner.domain.ring import Rank, Ring, check_ring
from services.runner.requests import Completion, Part, Requests
from services.runner.supervisor import FileSource, ShardSupervisor
from services.runner.views import InstanceView

logger = logging.getLogger(__name__)

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

    async def close(self) -> None:
        await self.shard.close()
        await asyncio.gather(*(sibling.close() for sibling in self.siblings.values()))


class Runner:
    """The instances of one node."""

    def __init__(self, node_id: str, files: FileSource) -> None:
        self.node_id = node_id
        self._files = files
        self._instances: dict[str, _Instance] = {}

    async def start_instance(self, instance_id: str, ring: Ring) -> InstanceView:
        """Start every shard of a ring whose head is this node; all ranks accept, or none runs on.

        Raises ShardringError as StartInstance documents.
        """
        check_ring(ring)
        if ring.head.node_id != self.node_id:
            raise _not_head(instance_id, ring)
        held = self._instances.get(instance_id)
        running = held is not None and not held.shard.mine.state.ended
        run_id = held.run_id if held is not None and running else uuid.uuid4().hex
        await self.start_shard(instance_id, ring, 0, run_id)
        siblings = self._instances[instance_id].siblings.values()
        results = await asyncio.gather(
            *(sibling.start(ring) for sibling in siblings), return_exceptions=True
        )
        refusals = [result for result in results if isinstance(result, BaseException)]
        if refusals:
            stops = (sibling.stop() for sibling in siblings)
            await asyncio.gather(*stops, self.stop(instance_id), return_exceptions=True)
            raise refusals[0]
        return self.get(instance_id)

    async def start_shard(self, instance_id: str, ring: Ring, rank: int, run_id: str) -> None:
        """Accept one rank of a ring. The same again while it lives changes nothing.

        `run_id` names this start of the instance among earlier ones.

        Raises ShardringError as StartShard documents.
        """
        if not _INSTANCE_ID.fullmatch(instance_id):
            raise invalid_field("instance_id", instance_id, '1 to 64 of a-z, 0-9, "-"')
        check_ring(ring)
        if not 0 <= rank < ring.world_size:
            raise invalid_field("rank", rank, f"0 to {ring.world_size - 1}")
        assigned = ring.ranks[rank]
        if assigned.node_id != self.node_id:
            raise ShardringError(
                Reason.WRONG_NODE,
                f"Rank {rank} is for node {assigned.node_id}, but this is node {self.node_id}.",
                metadata={"expected_node_id": assigned.node_id, "node_id": self.node_id},
            )
        held = self._instances.get(instance_id)
        if held is not None and held.run_id != run_id and held.shard.ending:
            async with asyncio.timeout(_END_SECONDS):
                await held.shard.ended()
        if held is not None and not held.shard.mine.state.ended:
            if (held.run_id, held.shard.ring, held.shard.rank.rank) == (run_id, ring, rank):
                return
            raise ShardringError(
                Reason.INSTANCE_EXISTS,
                f"Instance {instance_id} runs already, otherwise; stop it or take another id.",
                metadata={"instance_id": instance_id},
            )
        self._check_port(assigned)
        if held is not None:
            await held.close()
        await self._forget_old()
        trace_context: dict[str, str] = {}
        inject(trace_context)
        siblings = {
            other.rank: RemoteSibling(instance_id, run_id, other) for other in ring.others(rank)
        }
        shard = ShardSupervisor(
            instance_id, ring, assigned, self._files, {**siblings}, trace_context
        )

        async def submit(run: Run) -> None:
            await asyncio.gather(*(sibling.submit(run) for sibling in siblings.values()))

        self._instances[instance_id] = _Instance(run_id, shard, siblings, Requests(shard, submit))

    def submit(self, instance_id: str, run: Run) -> None:
        """Hand a request to this node's rank, which is not the head."""
        self._find(instance_id).shard.run(run)

    def get(self, instance_id: str) -> InstanceView:
        """Return one instance. Raises ShardringError(INSTANCE_NOT_FOUND)."""
        return _view(self._find(instance_id))

    def list(self) -> list[InstanceView]:
        """Return all instances, newest first."""
        views = [_view(instance) for instance in self._instances.values()]
        return sorted(views, key=lambda view: (-view.create_time, view.instance_id))

    async def watch(self, instance_id: str, run_id: str = "") -> AsyncIterator[InstanceView]:
        """Yield an instance as it is and at each change, until all its shards have ended.

        With `run_id`, another start of the instance counts as none.
        """
        instance = self._find(instance_id)
        if run_id not in ("", instance.run_id):
            raise _not_found(instance_id)
        while True:
            changed = instance.shard.changes.next
            yield _view(instance)
            if all(view.state.ended for view in instance.shard.views.values()):
                return
            await changed.wait()

    async def stop(self, instance_id: str) -> InstanceView:
        """Stop this node's shard and tell the others; return when this one is gone."""
        instance = self._find(instance_id)
        await instance.shard.stop()
        return _view(instance)

    async def stop_instance(self, instance_id: str) -> InstanceView:
        """Stop every shard. A sibling that cannot be reached sees this one end, and stops too."""
        instance = self._find(instance_id)
        stops = (sibling.stop() for sibling in instance.siblings.values())
        outcomes = await asyncio.gather(self.stop(instance_id), *stops, return_exceptions=True)
        for outcome in outcomes[1:]:
            if isinstance(outcome, BaseException):
                logger.warning("Stopping %s: %s", instance_id, outcome)
        return _view(instance)

    async def generate(
        self, instance_id: str, given: Input, sampling: Sampling, max_token_count: int
    ) -> AsyncIterator[Part | Completion]:
        """Yield the parts of one generation, then its completion. Closing cancels.

        Raises ShardringError as Generate documents.
        """
        instance = self._find(instance_id)
        if instance.shard.rank.rank != 0:
            raise _not_head(instance_id, instance.shard.ring)
        check_input(given)
        check_sampling(sampling)
        check_max_token_count(max_token_count)
        async for part in instance.requests.generate(given, sampling, max_token_count):
            yield part

    def reserved_bytes(self) -> int:
        """Return the memory promised to live shards, taken or not."""
        return sum(shard.rank.weight_bytes for shard in self._live())

    def loaded_bytes(self) -> int:
        """Return how much of that they hold by now."""
        return sum(min(s.rank.weight_bytes, s.mine.memory_bytes) for s in self._live())

    def _live(self) -> Iterator[ShardSupervisor]:
        for instance in self._instances.values():
            if not instance.shard.mine.state.ended:
                yield instance.shard

    async def close(self, why: str) -> None:
        """End all shards; their siblings elsewhere fail, naming this node."""
        for instance in self._instances.values():
            shard = instance.shard
            shard.fail(
                ShardringError(
                    Reason.NODE_LOST,
                    f"Node {shard.rank.node_name} with rank {shard.rank.rank} {why}.",
                    metadata={
                        "rank": shard.rank.rank,
                        "node_id": self.node_id,
                        "phase": shard.mine.state.name,
                    },
                )
            )
        await asyncio.gather(*(i.shard.ended() for i in self._instances.values()))
        await asyncio.gather(*(i.close() for i in self._instances.values()))

    def _find(self, instance_id: str) -> _Instance:
        instance = self._instances.get(instance_id)
        if instance is None:
            raise _not_found(instance_id)
        return instance

    def _check_port(self, rank: Rank) -> None:
        """Refuse at once a ring port that another process has."""
        if not rank.hosts:
            return
        port = parse_host_port(rank.hosts[rank.rank]).port
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("0.0.0.0", port))
            except OSError as error:
                raise ShardringError(
                    Reason.RING_PORT_IN_USE,
                    f"Port {port} of node {rank.node_name} is taken; place the instance again "
                    "under another request id.",
                    metadata={"port": port, "node_id": rank.node_id},
                ) from error

    async def _forget_old(self) -> None:
        now = time.time()
        ended = [
            (instance.shard.mine.state_time, instance_id)
            for instance_id, instance in self._instances.items()
            if instance.shard.mine.state.ended
        ]
        ended.sort(reverse=True)
        for index, (end_time, instance_id) in enumerate(ended):
            if index >= _ENDED_KEPT_COUNT or now - end_time > _ENDED_KEPT_SECONDS:
                await self._instances.pop(instance_id).close()


def random_seed() -> int:
    """Return a seed for a request that brings none."""
    return secrets.randbits(63)


def _view(instance: _Instance) -> InstanceView:
    shard = instance.shard
    return InstanceView(
        instance_id=shard.instance_id,
        ring=shard.ring,
        rank=shard.rank.rank,
        shards=tuple(view for _, view in sorted(shard.views.items())),
        create_time=shard.create_time,
        request_count=instance.requests.count,
        has_chat_template=shard.has_chat_template,
    )


def _not_found(instance_id: str) -> ShardringError:
    return ShardringError(
        Reason.INSTANCE_NOT_FOUND,
        f"This node knows no instance {instance_id!r}.",
        metadata={"instance_id": instance_id},
    )


def _not_head(instance_id: str, ring: Ring) -> ShardringError:
    return ShardringError(
        Reason.NOT_HEAD,
        f"The head of instance {instance_id} is node {ring.head.node_name}; ask there.",
        metadata={"instance_id": instance_id, "head_node_id": ring.head.node_id},
    )
