"""Calling one node's runner."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from services.common.addresses import HostPort
from services.common.channel import Remote
from shardring.placement.v1 import placement_pb2
from shardring.runner.v1 import instance_service_pb2, runner_pb2
from shardring.runner.v1.instance_service_pb2_grpc import InstanceServiceStub

# Short: one node that has gone must not hold up the list of all instances.
LIST_SECONDS = 3.0
START_SECONDS = 60.0
STOP_SECONDS = 30.0
_PAGE_SIZE = 1000


class RunnerClient:
    """The InstanceService of one node. Errors as `Remote` raises them, naming the node."""

    def __init__(self, node_id: str, label: str, addresses: Sequence[HostPort]) -> None:
        self.remote = Remote(f"node {label}", addresses, node_id=node_id)
        self._stub = InstanceServiceStub(self.remote.channel)

    async def start(
        self,
        instance_id: str,
        placement: placement_pb2.Placement,
        options: runner_pb2.InstanceOptions | None = None,
    ) -> runner_pb2.Instance:
        """Start every shard of a placement whose head this node is."""
        request = instance_service_pb2.StartInstanceRequest(
            instance_id=instance_id, placement=placement, options=options
        )
        response = await self.remote.unary(self._stub.StartInstance, request, timeout=START_SECONDS)
        return response.instance

    async def list(self) -> list[runner_pb2.Instance]:
        """Return all instances this node has a shard of."""
        instances: list[runner_pb2.Instance] = []
        request = instance_service_pb2.ListInstancesRequest(page_size=_PAGE_SIZE)
        while True:
            response = await self.remote.unary(
                self._stub.ListInstances, request, timeout=LIST_SECONDS
            )
            instances += response.instances
            request.page_token = response.next_page_token
            if not request.page_token:
                return instances

    async def get(self, instance_id: str) -> runner_pb2.Instance:
        """Return one instance, with the last log lines of this node's shard."""
        request = instance_service_pb2.GetInstanceRequest(instance_id=instance_id)
        response = await self.remote.unary(self._stub.GetInstance, request, timeout=LIST_SECONDS)
        return response.instance

    async def watch(self, instance_id: str) -> AsyncGenerator[runner_pb2.Instance, None]:
        """Yield an instance as it is, then at each change, until it has ended."""
        request = instance_service_pb2.WatchInstanceRequest(instance_id=instance_id)
        stream = self.remote.stream(self._stub.WatchInstance, request)
        async with aclosing(stream):
            async for response in stream:
                yield response.instance

    async def stop(self, instance_id: str) -> runner_pb2.Instance:
        """Stop an instance; return it as it then is."""
        request = instance_service_pb2.StopInstanceRequest(instance_id=instance_id)
        response = await self.remote.unary(self._stub.StopInstance, request, timeout=STOP_SECONDS)
        return response.instance

    async def generate(
        self, request: instance_service_pb2.GenerateRequest
    ) -> AsyncGenerator[instance_service_pb2.GenerateResponse, None]:
        """Yield the parts of one generation. Closing the iterator cancels it."""
        stream = self.remote.stream(self._stub.Generate, request)
        async with aclosing(stream):
            async for response in stream:
                yield response
