"""InstanceService: convert, call, convert."""

from collections.abc import AsyncIterator
from contextlib import aclosing

from services.common.paging import newest_first, page
from services.runner.app import Runner, random_seed
from services.runner.rpc.convert import (
    generation_from_proto,
    instance_to_proto,
    part_to_proto,
    ring_from_proto,
)
from shardring.runner.v1 import instance_service_pb2 as pb
from shardring.runner.v1 import instance_service_pb2_grpc


class InstanceServicer(instance_service_pb2_grpc.InstanceServiceServicer):
    """Serves a Runner."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    async def StartInstance(
        self, request: pb.StartInstanceRequest, context: object
    ) -> pb.StartInstanceResponse:
        """Start every shard."""
        ring = ring_from_proto(request.placement, request.options)
        view = await self._runner.start_instance(request.instance_id, ring)
        return pb.StartInstanceResponse(instance=instance_to_proto(view))

    async def GetInstance(
        self, request: pb.GetInstanceRequest, context: object
    ) -> pb.GetInstanceResponse:
        """Return one instance."""
        view = self._runner.get(request.instance_id)
        return pb.GetInstanceResponse(instance=instance_to_proto(view))

    async def ListInstances(
        self, request: pb.ListInstancesRequest, context: object
    ) -> pb.ListInstancesResponse:
        """List instances."""
        views, token = page(
            self._runner.list(),
            request.page_size,
            request.page_token,
            key=lambda view: newest_first(view.create_time, view.instance_id),
        )
        # A hundred failed instances with every rank's log would be megabytes.
        instances = [instance_to_proto(view.without_logs()) for view in views]
        return pb.ListInstancesResponse(instances=instances, next_page_token=token)

    async def WatchInstance(
        self, request: pb.WatchInstanceRequest, context: object
    ) -> AsyncIterator[pb.WatchInstanceResponse]:
        """Send an instance at each change."""
        async with aclosing(self._runner.watch(request.instance_id)) as views:
            async for view in views:
                yield pb.WatchInstanceResponse(instance=instance_to_proto(view))

    async def StopInstance(
        self, request: pb.StopInstanceRequest, context: object
    ) -> pb.StopInstanceResponse:
        """Stop every shard."""
        view = await self._runner.stop_instance(request.instance_id)
        return pb.StopInstanceResponse(instance=instance_to_proto(view))

    async def Generate(
        self, request: pb.GenerateRequest, context: object
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Stream one generation."""
        parts = self._runner.generate(
            request.instance_id, generation_from_proto(request, random_seed())
        )
        async with aclosing(parts):
            async for part in parts:
                yield part_to_proto(part)
