"""Another rank's runner."""

import asyncio
from collections.abc import Callable

from services.common.channel import Remote
from services.common.errors import Reason, ShardringError
from services.runner.domain.ring import Rank, Ring
from services.runner.rpc.convert import options_to_proto, ring_to_proto, shard_from_proto
from services.runner.views import ShardView
from shardring.runner.v1 import shard_service_pb2, shard_service_pb2_grpc

_CALL_SECONDS = 5.0
_STOP_SECONDS = 10.0
_KEEPALIVE_SECONDS = 3.0
# A connection may break and come back; a node that stays away for this long is lost.
_LOST_SECONDS = 1.5
_RETRY_SECONDS = 0.25
# The head tells all ranks at once, but a sibling may be told a little after it is asked for.
_TOLD_SECONDS = 10.0


class RemoteSibling:
    """One rank of an instance, on its own node."""

    def __init__(self, instance_id: str, run_id: str, rank: Rank) -> None:
        self.instance_id = instance_id
        self.run_id = run_id
        self.rank = rank
        self._remote = Remote(
            f"the runner on node {rank.node_name}",
            rank.endpoints,
            keepalive_seconds=_KEEPALIVE_SECONDS,
            node_id=rank.node_id,
        )
        self._stub = shard_service_pb2_grpc.ShardServiceStub(self._remote.channel)

    async def start(self, ring: Ring) -> None:
        """Have the node accept its shard."""
        request = shard_service_pb2.StartShardRequest(
            instance_id=self.instance_id,
            placement=ring_to_proto(ring),
            rank=self.rank.rank,
            run_id=self.run_id,
            options=options_to_proto(ring.options),
        )
        await self._remote.unary(self._stub.StartShard, request, timeout=_CALL_SECONDS)

    async def stop(self) -> None:
        """Have the node stop its shard."""
        request = shard_service_pb2.StopShardRequest(
            instance_id=self.instance_id, run_id=self.run_id
        )
        await self._remote.unary(self._stub.StopShard, request, timeout=_STOP_SECONDS)

    async def follow(self, on_change: Callable[[ShardView], None]) -> None:
        """Report the shard at each change until it ended.

        Raises ShardringError(NODE_LOST) when the node stays away or forgot the shard.
        """
        loop = asyncio.get_running_loop()
        last_contact, told = loop.time(), False
        request = shard_service_pb2.WatchShardRequest(
            instance_id=self.instance_id, run_id=self.run_id
        )
        while True:
            heard = ended = False
            try:
                # Read to its end, which follows the shard's: a stream left early keeps its
                # connection until the garbage collector finds it.
                async for message in self._remote.stream(self._stub.WatchShard, request):
                    heard = told = True
                    view = shard_from_proto(message.shard)
                    on_change(view)
                    ended = view.state.ended
                why = "its runner is stopping"
            except ShardringError as error:
                why = error.message
                if error.reason is Reason.INSTANCE_NOT_FOUND and told and not ended:
                    raise self._lost("it restarted and knows nothing of the instance") from error
            if ended:
                return
            if heard:
                last_contact = loop.time()  # a silent stream counts until keepalive ends it
            if loop.time() - last_contact > (_LOST_SECONDS if told else _TOLD_SECONDS):
                raise self._lost(why)
            await asyncio.sleep(_RETRY_SECONDS)

    async def close(self) -> None:
        """End the connection, once calls that are on their way have ended."""
        await self._remote.close(_CALL_SECONDS)

    def _lost(self, why: str) -> ShardringError:
        return ShardringError(
            Reason.NODE_LOST,
            f"Node {self.rank.node_name} with rank {self.rank.rank} is lost: {why}",
            metadata={"rank": self.rank.rank, "node_id": self.rank.node_id},
        )
