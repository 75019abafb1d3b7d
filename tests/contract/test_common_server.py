"""What every server and channel does, whoever is at the other end."""

import asyncio
import gc
import logging
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from opentelemetry.instrumentation.grpc import aio_server_interceptor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from services.common import telemetry
from services.common.addresses import HostPort
from services.common.channel import Remote
from services.common.errors import Reason, ShardringError
from services.common.server import Registration, Server, start_server

SERVE = """
import asyncio
from services.common.addresses import HostPort
from services.common.server import start_server

async def main():
    server = await start_server(HostPort("127.0.0.1", 0), [])
    print(server.port, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@asynccontextmanager
async def served(*registrations: Registration) -> AsyncIterator[tuple[Server, Remote]]:
    server = await start_server(HostPort("127.0.0.1", 0), registrations)
    remote = Remote("something", [HostPort("127.0.0.1", server.port)])
    try:
        yield server, remote
    finally:
        await remote.close()
        await server.stop()


async def test_health_can_be_watched() -> None:
    async with served() as (server, remote):
        call: Any = health_pb2_grpc.HealthStub(remote.channel).Watch  # type: ignore[attr-defined]
        states = remote.stream(call, health_pb2.HealthCheckRequest(), timeout=10)
        assert (await anext(states)).status == NOT_SERVING
        await server.set_serving(True)
        assert (await anext(states)).status == SERVING
        await states.aclose()


async def test_a_callee_that_is_stopped_is_noticed() -> None:
    """Its kernel still takes what is sent; only a ping that stays unanswered tells."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SERVE, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        port = int(await asyncio.wait_for(process.stdout.readline(), 30))
        remote = Remote("something", [HostPort("127.0.0.1", port)], keepalive_seconds=1)
        call: Any = health_pb2_grpc.HealthStub(remote.channel).Watch  # type: ignore[attr-defined]
        states = remote.stream(call, health_pb2.HealthCheckRequest())
        assert (await anext(states)).status == NOT_SERVING
        process.send_signal(signal.SIGSTOP)
        async with asyncio.timeout(10):
            with pytest.raises(ShardringError) as failure:
                await anext(states)
        assert failure.value.reason is Reason.SERVICE_UNAVAILABLE
        assert failure.value.metadata["service"] == "something"
        await remote.close()
    finally:
        process.kill()
        await process.wait()


async def test_a_stream_whose_caller_leaves_ends_in_order(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, not when garbage is collected, and with its span."""
    spans = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    recording: Any = aio_server_interceptor(tracer_provider=provider)
    monkeypatch.setattr(telemetry, "server_interceptors", lambda: [recording])
    closed: asyncio.Future[None] = asyncio.Future()

    async def endless(request: object, context: object) -> AsyncIterator[bytes]:
        try:
            while True:
                # Large, so that the stream waits for its reader between two of them.
                yield bytes(2**20)
        finally:
            closed.set_result(None)

    handlers: dict[str, Any] = {"Stream": grpc.unary_stream_rpc_method_handler(endless)}
    generic = grpc.method_handlers_generic_handler("test.Service", handlers)
    registration = Registration(
        "grpc.health.v1.Health", lambda server: server.add_generic_rpc_handlers((generic,))
    )
    with caplog.at_level(logging.ERROR):
        async with served(registration) as (_, remote):
            call: Any = remote.channel.unary_stream("/test.Service/Stream")
            stream = remote.stream(call, b"")
            await anext(stream)
            gc.disable()
            try:
                await stream.aclose()
                await asyncio.wait_for(closed, 10)
            finally:
                gc.enable()
    assert [span.name for span in spans.get_finished_spans()] == ["/test.Service/Stream"]
    assert caplog.records == []
