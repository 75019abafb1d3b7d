"""ShardService: convert, call, convert."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace

from services.runner.app import Runner
from services.runner.domain.state import ShardState
from services.runner.rpc.convert import ring_from_proto, shard_to_proto
from services.runner.views import InstanceView, ShardView
from shardring.runner.v1 import runner_pb2, shard_service_pb2_grpc
from shardring.runner.v1 import shard_service_pb2 as pb


class ShardServicer(shard_service_pb2_grpc.ShardServiceServicer):
    """Serves a Runner to the other ranks' runners."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    async def StartShard(
        self, request: pb.StartShardRequest, context: object
    ) -> pb.StartShardResponse:
        """Accept a shard."""
        ring = ring_from_proto(request.placement, request.options)
        await self._runner.start_shard(request.instance_id, ring, request.rank, request.run_id)
        return pb.StartShardResponse(shard=_own_shard(self._runner.get(request.instance_id)))

    async def WatchShard(
        self, request: pb.WatchShardRequest, context: object
    ) -> AsyncIterator[pb.WatchShardResponse]:
        """Send the shard at each change, until it ended."""
        last = None
        async with aclosing(self._runner.watch(request.instance_id, request.run_id)) as views:
            async for view in views:
                mine = _told(view.shards[view.rank])
                if mine != last:
                    yield pb.WatchShardResponse(shard=_own_shard(view))
                if mine.state.ended:
                    return
                last = mine

    async def StopShard(
        self, request: pb.StopShardRequest, context: object
    ) -> pb.StopShardResponse:
        """Stop the shard."""
        await self._runner.stop_shard(request.instance_id, request.run_id)
        return pb.StopShardResponse()


def _own_shard(view: InstanceView) -> runner_pb2.Shard:
    rank = view.rank
    return shard_to_proto(view.instance_id, view.ring.ranks[rank], _told(view.shards[rank]))


def _told(shard: ShardView) -> ShardView:
    """Return a shard as other ranks are told of it: its log only when it FAILED."""
    return shard if shard.state is ShardState.FAILED else replace(shard, log_lines=())
