"""One function builds every gRPC server: interceptors, health, reflection, graceful stop."""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from services.common import telemetry
from services.common.access import AccessInterceptor
from services.common.addresses import HostPort
from services.common.channel import MAX_MESSAGE_BYTES, MAX_METADATA_BYTES
from services.common.errors import ShardringError
from services.common.interceptors import ErrorInterceptor, StreamInterceptor
from services.common.security import Security, current_security, is_loopback

logger = logging.getLogger(__name__)

STOP_GRACE_SECONDS = 3.0


@dataclass(frozen=True)
class Registration:
    """One gRPC service of a server: its full proto name, and how to add its servicer."""

    full_name: str
    add_to_server: Callable[[grpc.aio.Server], None]


@dataclass(frozen=True)
class Limits:
    """What one client, or all together, may take of a server.

    `connection_age_seconds`: after that time (a tenth more or less) a connection is given no new
    calls: the client makes another one, with the certificate it has by then. Calls that run go on
    for `connection_grace_seconds`; what watches something resumes on the new connection.
    """

    message_bytes: int = MAX_MESSAGE_BYTES
    metadata_bytes: int = MAX_METADATA_BYTES
    # Of one connection. A gateway sends all its requests over one.
    streams: int = 1_024
    connections: int = 4_096
    connection_age_seconds: float = 3_600.0
    connection_grace_seconds: float = 86_400.0
    # Until a client has said what it wants: HTTP/2, and TLS where that is on.
    handshake_seconds: float = 10.0

    def channel_arguments(self) -> list[tuple[str, int]]:
        """Return these limits as gRPC takes them."""
        return [
            ("grpc.max_receive_message_length", self.message_bytes),
            ("grpc.max_send_message_length", self.message_bytes),
            ("grpc.max_metadata_size", self.metadata_bytes),
            ("grpc.absolute_max_metadata_size", self.metadata_bytes),
            ("grpc.max_concurrent_streams", self.streams),
            ("grpc.max_allowed_incoming_connections", self.connections),
            ("grpc.max_connection_age_ms", round(self.connection_age_seconds * 1e3)),
            ("grpc.max_connection_age_grace_ms", round(self.connection_grace_seconds * 1e3)),
            ("grpc.server_handshake_timeout_ms", round(self.handshake_seconds * 1e3)),
        ]


class StartError(Exception):
    """The process cannot start as it was asked to; the message says why and what to do."""


class ListenError(StartError):
    """The asked address cannot be listened on; the message says why and what to do."""


class Server:
    """A started gRPC server. Health says NOT_SERVING until `set_serving(True)`."""

    def __init__(
        self, server: grpc.aio.Server, health_servicer: health.aio.HealthServicer, port: int
    ) -> None:
        self._server = server
        self._health = health_servicer
        self.port = port

    async def set_serving(self, serving: bool) -> None:
        """Say whether what this process needs is ready."""
        state = health_pb2.HealthCheckResponse
        await self._health.set("", state.SERVING if serving else state.NOT_SERVING)

    async def stop(self) -> None:
        """Refuse new calls, let running ones end for a few seconds, then cancel them."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(STOP_GRACE_SECONDS)


async def start_server(
    listen: HostPort,
    registrations: Sequence[Registration],
    *,
    security: Security | None = None,
    limits: Limits | None = None,
) -> Server:
    """Start serving on `listen` (port 0: any free one), with TLS where `security` has it.

    `security` None: as this process works. Raises ListenError when the address is taken or not
    this machine's, or reaches further than loopback without TLS and without a word that it may.
    """
    security = security or current_security()
    check_listen(listen, security)
    server = grpc.aio.server(
        interceptors=[
            StreamInterceptor(),
            *telemetry.server_interceptors(),
            ErrorInterceptor(),
            *([] if security.tls is None else [AccessInterceptor(security.allowed)]),
        ],
        options=[
            # Two processes on one port would each get half the calls.
            ("grpc.so_reuseport", 0),
            *(limits or Limits()).channel_arguments(),
            # A caller that vanished is noticed within 20 s, and its streams are cancelled.
            ("grpc.keepalive_time_ms", 10_000),
            ("grpc.http2.ping_timeout_ms", 10_000),
            # Runners ping each other every second or two to notice a lost node in time.
            ("grpc.http2.max_ping_strikes", 0),
            ("grpc.keepalive_permit_without_calls", 1),
        ],
    )
    health_servicer = health.aio.HealthServicer()
    await health_servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    for registration in registrations:
        registration.add_to_server(server)
    names = [registration.full_name for registration in registrations]
    reflection.enable_server_reflection(
        [*names, health.SERVICE_NAME, reflection.SERVICE_NAME], server
    )
    try:
        if security.tls is None:
            port = server.add_insecure_port(str(listen))
        else:
            port = server.add_secure_port(str(listen), security.tls.server_credentials())
    except RuntimeError as error:
        raise ListenError(
            f"Cannot listen on {listen}: the port is taken, or the address is not this machine's. "
            "Choose another with --listen."
        ) from error
    await server.start()
    address = HostPort(listen.host, port)
    logger.info("Serving %s on %s%s", ", ".join(names), address, " with TLS" * bool(security.tls))
    if security.tls is None and not is_loopback(listen.host):
        logger.warning("In the clear: whoever reaches %s can do everything", address)
    return Server(server, health_servicer, port)


def check_listen(listen: HostPort, security: Security) -> None:
    """Raise ListenError unless this address may be listened on."""
    if refusal := security.check_listen(listen.host):
        raise ListenError(f"Not listening on {listen}. {refusal}")


def announce(service: str, address: HostPort) -> None:
    """Say on standard output where a service listens; with port 0 callers learn it from here."""
    print(f"shardring {service} listens on {address}", flush=True)


# Set by whoever starts a process and wants it to end with the pipe on its standard input, so that
# it does not outlive them however they end.
STOP_WITH_STDIN = "SHARDRING_STOP_WITH_STDIN"


async def until_stopped() -> None:
    """Return when the process is asked to stop: by SIGTERM, SIGINT or the end of its lifeline."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    if os.environ.get(STOP_WITH_STDIN):
        loop.add_reader(0, _read_lifeline, stopped.set)
    await stopped.wait()
    loop.remove_reader(0)
    logger.info("Stopping")


def _read_lifeline(stop: Callable[[], None]) -> None:
    if not os.read(0, 1024):
        asyncio.get_running_loop().remove_reader(0)
        stop()


def run(main: Callable[[], Awaitable[None]]) -> None:
    """Run a service's main coroutine; print what cannot be helped, and exit with 1."""

    async def guarded() -> None:
        await main()

    try:
        asyncio.run(guarded())
    except (StartError, ShardringError) as error:
        print(error, file=sys.stderr)
        sys.exit(1)
