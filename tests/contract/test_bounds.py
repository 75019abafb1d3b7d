"""What one client may take of a server, and what is left to the others."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from services.common.addresses import HostPort
from services.common.channel import Remote
from services.common.errors import Reason, ShardringError
from services.common.server import Limits, Registration, start_server

SECONDS = 20.0


class Service:
    """Says who calls; streams a word whenever it is told to."""

    def __init__(self) -> None:
        self.word = asyncio.Event()
        self.streams = 0

    async def peer(self, request: bytes, context: Any) -> bytes:
        return str(context.peer()).encode()

    async def words(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        self.streams += 1
        try:
            yield b"first"
            while True:
                await self.word.wait()
                self.word.clear()
                yield b"next"
        finally:
            self.streams -= 1

    def registration(self) -> Registration:
        handlers: dict[str, Any] = {
            "Peer": grpc.unary_unary_rpc_method_handler(self.peer),
            "Words": grpc.unary_stream_rpc_method_handler(self.words),
        }
        generic = grpc.method_handlers_generic_handler("test.Service", handlers)
        return Registration(
            "grpc.health.v1.Health", lambda server: server.add_generic_rpc_handlers((generic,))
        )


class Client:
    """One connection to it."""

    def __init__(self, port: int) -> None:
        self.remote = Remote("something", [HostPort("127.0.0.1", port)])
        channel: Any = self.remote.channel
        self._peer = channel.unary_unary("/test.Service/Peer")
        self._words = channel.unary_stream("/test.Service/Words")

    async def peer(self, payload: bytes = b"", timeout: float = SECONDS) -> bytes:
        answer: bytes = await self.remote.unary(self._peer, payload, timeout=timeout)
        return answer

    def words(self) -> Any:
        return self.remote.stream(self._words, b"")


@asynccontextmanager
async def served(limits: Limits, clients: int = 1) -> AsyncIterator[tuple[Any, ...]]:
    service = Service()
    server = await start_server(HostPort("127.0.0.1", 0), [service.registration()], limits=limits)
    made = [Client(server.port) for _ in range(clients)]
    try:
        yield service, server, *made
    finally:
        await asyncio.gather(*(client.remote.close() for client in made))
        await server.stop()


async def test_an_old_connection_is_replaced_and_its_streams_go_on() -> None:
    async with served(Limits(connection_age_seconds=0.3)) as (service, _, client):
        words = client.words()
        assert await anext(words) == b"first"
        first = await client.peer()
        async with asyncio.timeout(SECONDS):
            while await client.peer() == first:
                await asyncio.sleep(0.01)
        service.word.set()
        assert await asyncio.wait_for(anext(words), SECONDS) == b"next"
        await words.aclose()


async def test_a_stream_beyond_the_grace_ends_and_can_be_opened_anew() -> None:
    limits = Limits(connection_age_seconds=0.2, connection_grace_seconds=0.2)
    async with served(limits) as (_, _, client):
        words = client.words()
        assert await anext(words) == b"first"
        with pytest.raises(ShardringError) as ended:
            await asyncio.wait_for(anext(words), SECONDS)
        assert ended.value.reason is Reason.SERVICE_UNAVAILABLE
        again = client.words()
        assert await asyncio.wait_for(anext(again), SECONDS) == b"first"
        await again.aclose()


async def test_what_is_too_large_is_refused_and_nobody_else_notices() -> None:
    limits = Limits(message_bytes=10_000, metadata_bytes=4_000)
    async with served(limits, 2) as (_, _, client, other):
        with pytest.raises(ShardringError, match="RESOURCE_EXHAUSTED"):
            await client.peer(b"x" * 20_000)
        channel: Any = client.remote.channel
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await channel.unary_unary("/test.Service/Peer")(
                b"", metadata=(("x", "y" * 20_000),), timeout=SECONDS
            )
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await client.peer()
        assert await other.peer()


async def test_a_client_with_all_its_streams_waits_and_others_do_not() -> None:
    async with served(Limits(streams=2), 2) as (service, _, client, other):
        held = [client.words(), client.words()]
        for words in held:
            assert await anext(words) == b"first"
        third = asyncio.create_task(client.peer())
        assert await other.peer()
        assert not third.done()
        assert service.streams == 2
        await held.pop().aclose()
        assert await asyncio.wait_for(third, SECONDS)
        await held.pop().aclose()


async def test_connections_beyond_the_limit_are_closed_and_those_before_stay() -> None:
    async with served(Limits(connections=2)) as (_, server, client):
        assert await client.peer()
        held, closed = [], 0
        async with asyncio.timeout(SECONDS):
            while not closed:
                reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
                held.append(writer)
                # A server speaks first in HTTP/2, once the client has said its preface.
                writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0")
                try:
                    closed += not await reader.read(1)
                except ConnectionError:
                    closed += 1
        assert len(held) <= 3
        assert await client.peer()
        for writer in held:
            writer.close()


async def test_who_says_nothing_is_hung_up_on() -> None:
    async with served(Limits(handshake_seconds=0.2)) as (_, server, client):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        # What the server says first is its settings; then it waits for the client's.
        await asyncio.wait_for(reader.read(), SECONDS)
        writer.close()
        assert await client.peer()
