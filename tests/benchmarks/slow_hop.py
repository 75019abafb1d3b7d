"""A TCP way that delivers everything late, in both directions: stands for a long cable."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.common.addresses import HostPort

_CHUNK_BYTES = 65_536
_RETRY_SECONDS = 0.05


@asynccontextmanager
async def slow_hop(listen: HostPort, sink: HostPort, seconds: float) -> AsyncIterator[None]:
    """Hand on to `sink`, after so long, what comes in. Whoever listens there may come later."""
    carrying: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(_join(reader, writer, sink, seconds))
        carrying.add(task)
        task.add_done_callback(carrying.discard)

    server = await asyncio.start_server(accept, listen.host, listen.port)
    try:
        yield
    finally:
        server.close()
        for task in carrying:
            task.cancel()
        await asyncio.gather(*carrying, return_exceptions=True)


async def _join(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, sink: HostPort, seconds: float
) -> None:
    while True:
        try:
            far_reader, far_writer = await asyncio.open_connection(sink.host, sink.port)
            break
        except ConnectionRefusedError:
            await asyncio.sleep(_RETRY_SECONDS)
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(_carry(reader, far_writer, seconds))
            group.create_task(_carry(far_reader, writer, seconds))
    finally:
        writer.close()
        far_writer.close()


async def _carry(source: asyncio.StreamReader, sink: asyncio.StreamWriter, seconds: float) -> None:
    """Carry one direction to its end."""
    flying: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
    clock = asyncio.get_running_loop().time

    async def deliver() -> None:
        while True:
            arrival, data = await flying.get()
            await asyncio.sleep(arrival - clock())
            if not data:
                return
            sink.write(data)

    delivering = asyncio.create_task(deliver())
    try:
        # A rank that ends may reset the connection.
        with contextlib.suppress(ConnectionError):
            while data := await source.read(_CHUNK_BYTES):
                flying.put_nowait((clock() + seconds, data))
        flying.put_nowait((clock() + seconds, b""))
        await delivering
        with contextlib.suppress(OSError):
            sink.write_eof()
    finally:
        delivering.cancel()
