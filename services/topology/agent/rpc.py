"""NodeIdentityService, which every node serves, and the call to it."""

import secrets
from typing import Any

from grpc.aio import ServicerContext

from services.common.channel import Remote
from services.common.errors import invalid_field
from services.common.server import Registration
from shardring.topology.v1 import node_identity_service_pb2 as pb
from shardring.topology.v1.node_identity_service_pb2_grpc import (
    NodeIdentityServiceServicer,
    NodeIdentityServiceStub,
    add_NodeIdentityServiceServicer_to_server,
)

NONCE_BYTES = 16


class NodeIdentityServicer(NodeIdentityServiceServicer):
    """Says who answers here."""

    def __init__(self, node_id: str) -> None:
        self._node_id = node_id

    async def Identify(
        self, request: pb.IdentifyRequest, context: ServicerContext[Any, Any]
    ) -> pb.IdentifyResponse:
        """Answer with the node id and the nonce."""
        if not NONCE_BYTES <= len(request.nonce) <= 64:
            raise invalid_field("nonce", f"{len(request.nonce)} bytes", "16 to 64 bytes")
        return pb.IdentifyResponse(node_id=self._node_id, nonce=request.nonce)


def identity_registration(node_id: str) -> Registration:
    """Return NodeIdentityService for `start_server`."""
    return Registration(
        "shardring.topology.v1.NodeIdentityService",
        lambda server: add_NodeIdentityServiceServicer_to_server(
            NodeIdentityServicer(node_id), server
        ),
    )


async def identify(remote: Remote, *, timeout: float) -> str | None:
    """Ask who answers; None when the answer is to another question (not our nonce).

    Raises ShardringError when there is no answer in time.
    """
    stub = NodeIdentityServiceStub(remote.channel)
    nonce = secrets.token_bytes(NONCE_BYTES)
    answer = await remote.unary(stub.Identify, pb.IdentifyRequest(nonce=nonce), timeout=timeout)
    return answer.node_id if answer.nonce == nonce else None
