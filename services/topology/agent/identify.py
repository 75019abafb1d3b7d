"""Asking who answers at an address."""

import secrets

from services.common.channel import Remote
from shardring.topology.v1 import node_identity_service_pb2 as pb
from shardring.topology.v1.node_identity_service_pb2_grpc import NodeIdentityServiceStub

NONCE_BYTES = 16


async def identify(remote: Remote, *, timeout: float) -> str | None:
    """Ask who answers; None when the answer is to another question (not our nonce).

    Raises ShardringError when there is no answer in time.
    """
    stub = NodeIdentityServiceStub(remote.channel)
    nonce = secrets.token_bytes(NONCE_BYTES)
    answer = await remote.unary(stub.Identify, pb.IdentifyRequest(nonce=nonce), timeout=timeout)
    return answer.node_id if answer.nonce == nonce else None
