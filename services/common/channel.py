"""Calling another service: a channel with keepalive, retries, deadlines and named errors."""

import ipaddress
import json
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import TypeVar

import grpc
from grpc.aio import UnaryStreamMultiCallable, UnaryUnaryMultiCallable

from services.common import deadline, telemetry
from services.common.addresses import HostPort
from services.common.errors import ShardringError
from services.common.handshake import explanation, names_another, wrong_node
from services.common.security import Security, current_security
from services.common.status import error_from_rpc
from services.common.tls import node_host

Request = TypeVar("Request")
Response = TypeVar("Response")

MAX_MESSAGE_BYTES = 64 * 2**20
# Of one call's headers or trailers.
MAX_METADATA_BYTES = 32 * 2**10

# Calls that may be sent again when the connection fails; all others are sent once.
_IDEMPOTENT = {
    "shardring.topology.v1.TopologyService": ["ReportNode", "ReportLinks", "GetTopology"],
    "shardring.downloads.v1.DownloadsService": [
        "StartDownload",
        "GetDownload",
        "ListDownloads",
        "GetFractions",
        "CancelDownload",
        "GetModel",
        "ListModels",
    ],
    "shardring.placement.v1.PlacementService": ["Place", "PreviewPlacements"],
    "shardring.runner.v1.InstanceService": [
        "StartInstance",
        "GetInstance",
        "ListInstances",
        "StopInstance",
    ],
    "shardring.runner.v1.ShardService": ["StartShard", "StopShard"],
}
_SERVICE_CONFIG = json.dumps(
    {
        "methodConfig": [
            {
                "name": [
                    {"service": service, "method": method}
                    for service, methods in _IDEMPOTENT.items()
                    for method in methods
                ],
                "retryPolicy": {
                    "maxAttempts": 4,
                    "initialBackoff": "0.1s",
                    "maxBackoff": "1s",
                    "backoffMultiplier": 2,
                    "retryableStatusCodes": ["UNAVAILABLE"],
                },
            }
        ]
    }
)


class Remote:
    """One callee: a lazily connected channel, with the callee's name for error messages.

    `addresses` may name several addresses of the same process; the first that answers is used.
    """

    def __init__(
        self,
        service: str,
        addresses: Sequence[HostPort],
        *,
        keepalive_seconds: float = 10,
        node_id: str = "",
        security: Security | None = None,
    ) -> None:
        """`keepalive_seconds`: how long a silent connection counts as alive.

        `node_id`: the node that has to be there. With TLS it proves that, or calls fail with
        WRONG_NODE; a callee of which no id is known proves that the address is its own. `security`
        None: as this process works. Raises INVALID_FIELD when its files are of no use any more.
        """
        self.service = service
        self.address = str(addresses[0])
        self._addresses = addresses
        self._node_id = node_id
        self._tls = (security or current_security()).tls
        # Once it has answered, it is not for want of TLS that it does not.
        self._answered = False
        half_ms = round(keepalive_seconds * 500)
        proving = (
            [("grpc.ssl_target_name_override", node_host(node_id))] if self._tls and node_id else []
        )
        make_channel = (
            grpc.aio.insecure_channel
            if self._tls is None
            else partial(grpc.aio.secure_channel, credentials=self._tls.channel_credentials())
        )
        self.channel: grpc.aio.Channel = make_channel(
            _target(addresses),
            options=[
                *proving,
                ("grpc.keepalive_time_ms", half_ms),
                # The answer to a keepalive ping is awaited for this long, whatever
                # grpc.keepalive_timeout_ms says (grpc/grpc#39239); by default a minute.
                ("grpc.http2.ping_timeout_ms", half_ms),
                ("grpc.http2.max_pings_without_data", 0),
                ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
                ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
                ("grpc.max_metadata_size", MAX_METADATA_BYTES),
                ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
                ("grpc.initial_reconnect_backoff_ms", 200),
                # How long one attempt to connect may take.
                ("grpc.min_reconnect_backoff_ms", min(3_000, half_ms)),
                ("grpc.max_reconnect_backoff_ms", 2_000),
                ("grpc.service_config", _SERVICE_CONFIG),
                # Nodes are reached directly: through a proxy an address proves nothing.
                ("grpc.enable_http_proxy", 0),
                # A channel of its own each: processes on one host must not share a broken one.
                ("grpc.use_local_subchannel_pool", 1),
            ],
            interceptors=telemetry.client_interceptors(),
        )

    async def unary(
        self,
        method: UnaryUnaryMultiCallable[Request, Response],
        request: Request,
        *,
        timeout: float,
        wait_for_ready: bool = False,
    ) -> Response:
        """Call and return the answer within `timeout` seconds and what is left of the caller's.

        Raises the ShardringError that the callee meant, or SERVICE_UNAVAILABLE or
        SERVICE_TIMEOUT naming it.
        """
        try:
            response = await method(
                request, timeout=deadline.clip(timeout), wait_for_ready=wait_for_ready
            )
        except grpc.aio.AioRpcError as error:
            raise await self._meant(error) from error
        self._answered = True
        return response

    async def stream(
        self,
        method: UnaryStreamMultiCallable[Request, Response],
        request: Request,
        *,
        timeout: float | None = None,
    ) -> AsyncGenerator[Response, None]:
        """Call and yield the answers; errors as `unary`. Closing the iterator cancels the call.

        `timeout` None: as long as the stream lives; keepalive ends it when the callee is gone.
        """
        call = method(request, timeout=None if timeout is None else deadline.clip(timeout))
        responses = aiter(call)
        try:
            async for response in responses:
                self._answered = True
                yield response
        except grpc.aio.AioRpcError as error:
            raise await self._meant(error) from error
        finally:
            call.cancel()
            # Closed here and now, so that a stream left early still ends its span.
            if isinstance(responses, AsyncGenerator):
                await responses.aclose()

    async def _meant(self, error: grpc.aio.AioRpcError) -> ShardringError:
        """Return the error that the callee meant, or why it was not reached."""
        why = ""
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            details = error.details() or ""
            if self._tls and self._node_id and names_another(details):
                return await wrong_node(self._addresses, self._tls, self._node_id)
            why = await explanation(details, self._addresses, self._tls, ask=not self._answered)
        return error_from_rpc(error, service=self.service, address=self.address, why=why)

    async def close(self, grace_seconds: float | None = None) -> None:
        """End the channel; calls on it may still end by themselves for `grace_seconds`."""
        await self.channel.close(grace_seconds)


def _target(addresses: Sequence[HostPort]) -> str:
    """Return a gRPC target; addresses of the first one's family are tried in order."""
    families = [_family(address.host) for address in addresses]
    if families[0] == "dns":
        return f"dns:{addresses[0]}"
    same = [str(a) for a, family in zip(addresses, families, strict=True) if family == families[0]]
    # A scope's "%" has to be escaped in a target URI.
    return f"{families[0]}:{','.join(same)}".replace("%", "%25")


def _family(host: str) -> str:
    try:
        return f"ipv{ipaddress.ip_address(host).version}"
    except ValueError:
        return "dns"
