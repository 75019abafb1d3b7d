"""NodeIdentityService, which every node serves."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from grpc.aio import ServicerContext

from services.common.errors import invalid_field
from services.common.server import Registration
from services.topology.agent.bursts import MAX_BURST_BYTES, BurstGate, burst_parts
from services.topology.agent.identify import NONCE_BYTES
from shardring.topology.v1 import node_identity_service_pb2 as pb
from shardring.topology.v1.node_identity_service_pb2_grpc import (
    NodeIdentityServiceServicer,
    add_NodeIdentityServiceServicer_to_server,
)


class NodeIdentityServicer(NodeIdentityServiceServicer):
    """Says who answers here, and sends bursts to be measured."""

    def __init__(self, node_id: str, gate: BurstGate) -> None:
        self._node_id = node_id
        self._gate = gate

    async def Identify(
        self, request: pb.IdentifyRequest, context: ServicerContext[Any, Any]
    ) -> pb.IdentifyResponse:
        """Answer with the node id and the nonce."""
        if not NONCE_BYTES <= len(request.nonce) <= 64:
            raise invalid_field("nonce", f"{len(request.nonce)} bytes", "16 to 64 bytes")
        return pb.IdentifyResponse(node_id=self._node_id, nonce=request.nonce)

    async def MeasureLink(
        self, request: pb.MeasureLinkRequest, context: ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.MeasureLinkResponse]:
        """Send a burst."""
        if not 1 <= request.byte_count <= MAX_BURST_BYTES:
            raise invalid_field("byte_count", request.byte_count, f"1 to {MAX_BURST_BYTES}")
        async with aclosing(burst_parts(request.byte_count, self._gate)) as parts:
            async for part in parts:
                yield pb.MeasureLinkResponse(payload=part)


def identity_registration(node_id: str, gate: BurstGate | None = None) -> Registration:
    """Return NodeIdentityService for `start_server`.

    `gate`: the one of the node's own agent, so that both take turns; None: one of its own.
    """
    servicer = NodeIdentityServicer(node_id, gate or BurstGate(node_id))
    return Registration(
        "shardring.topology.v1.NodeIdentityService",
        lambda server: add_NodeIdentityServiceServicer_to_server(servicer, server),
    )
