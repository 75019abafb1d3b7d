"""The instances of a cluster as they change, each followed at its head."""

import asyncio
import contextlib
from collections.abc import Coroutine, Sequence

from services.cli.census import ended, take_census
from services.cli.client import Cluster
from services.common.errors import ShardringError
from shardring.runner.v1 import runner_pb2

# How often nodes are asked which instances there are: what an instance does, it tells by itself.
_CENSUS_SECONDS = 5.0
# At most so often, when one cannot be followed.
_PAUSE_SECONDS = 1.0
# How long one that has ended, or that no node knows any more, stays to be read about.
_GONE_SECONDS = 30.0


class Board:
    """What is known of the instances that are watched, `changed` set whenever that is more.

    `only`: ids of the instances to show; empty: all. Those that have ended before the first look
    are left out unless they are named.
    """

    def __init__(self, cluster: Cluster, only: Sequence[str] = ()) -> None:
        self._cluster = cluster
        self._only = frozenset(only)
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._held: dict[str, runner_pb2.Instance] = {}
        self._gone_since: dict[str, float] = {}
        self._broken = asyncio.Event()
        self.changed = asyncio.Event()
        # Instance id -> why it could not be followed at last.
        self.remarks: dict[str, str] = {}
        # Label of a node that was not asked -> why.
        self.unreachable: dict[str, str] = {}
        # Why it is not known which nodes there are; empty when it is.
        self.missing = ""

    @property
    def instances(self) -> list[runner_pb2.Instance]:
        """The instances, newest first."""
        return sorted(
            self._held.values(), key=lambda i: (-i.create_time.ToNanoseconds(), i.instance_id)
        )

    async def look(self) -> None:
        """Ask all nodes which instances there are.

        Raises ShardringError when topology cannot be asked, and INSTANCE_NOT_FOUND for a named one
        that there is not.
        """
        census = await take_census(self._cluster)
        self.unreachable = {label: error.message for label, error in census.unreachable.items()}
        self.missing = ""
        for instance_id in self._only - self._held.keys():
            census.find(instance_id)
        for instance in census.instances:
            instance_id = instance.instance_id
            wanted = instance_id in self._only if self._only else not ended(instance)
            # Its own word on an instance is newer than the list.
            if (wanted or instance_id in self._held) and not self._is_watched(instance_id):
                self._held[instance_id] = instance
                if ended(instance):
                    self.remarks.pop(instance_id, None)
        self._drop_gone({instance.instance_id for instance in census.instances})
        self.changed.set()

    async def follow(self, show: Coroutine[None, None, None]) -> None:
        """Follow the instances, and look for new ones, for as long as `show` runs."""
        tasks = [asyncio.create_task(self._keep_up()), asyncio.create_task(show)]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            tasks += self._watches.values()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep_up(self) -> None:
        while True:
            for instance in self._held.values():
                if not ended(instance) and not self._is_watched(instance.instance_id):
                    self._watches[instance.instance_id] = asyncio.create_task(
                        self._watch(instance), name=f"watch {instance.instance_id}"
                    )
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._broken.wait(), _CENSUS_SECONDS - _PAUSE_SECONDS)
            await asyncio.sleep(_PAUSE_SECONDS)
            self._broken.clear()
            try:
                await self.look()
            except ShardringError as error:
                self.missing = error.message
                self.changed.set()

    async def _watch(self, instance: runner_pb2.Instance) -> None:
        instance_id = instance.instance_id
        try:
            watch = self._cluster.head(instance.placement).watch(instance_id)
            async with contextlib.aclosing(watch) as changes:
                async for change in changes:
                    self._held[instance_id] = change
                    self.remarks.pop(instance_id, None)
                    self.changed.set()
        except ShardringError as error:
            # The next look, which comes soon, asks the other ranks about it.
            self.remarks[instance_id] = error.message
            self.changed.set()
            self._broken.set()

    def _is_watched(self, instance_id: str) -> bool:
        watch = self._watches.get(instance_id)
        if watch is None or not watch.done():
            return watch is not None
        del self._watches[instance_id]
        watch.result()
        return False

    def _drop_gone(self, known: set[str]) -> None:
        """Forget what has been over, or unknown, for a while, unless it was asked for by name."""
        now = asyncio.get_running_loop().time()
        for instance_id, instance in list(self._held.items()):
            gone = ended(instance) or instance_id not in known
            if not gone or self._is_watched(instance_id) or instance_id in self._only:
                self._gone_since.pop(instance_id, None)
            elif now - self._gone_since.setdefault(instance_id, now) > _GONE_SECONDS:
                del self._held[instance_id], self._gone_since[instance_id]
                self.remarks.pop(instance_id, None)
