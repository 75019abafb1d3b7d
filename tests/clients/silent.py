"""A way to a server that can go silent, as when a machine loses power or its cable is pulled."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.common.addresses import HostPort


class SilentProxy:
    """Carries bytes both ways until `silence`; from then on connections stay open and say nothing.

    `address`: where to connect instead.
    """

    def __init__(self, target: HostPort) -> None:
        self._target = target
        self._silent = False
        self._tasks: set[asyncio.Task[None]] = set()
        self.address = HostPort("127.0.0.1", 0)

    def silence(self) -> None:
        """Carry nothing any more."""
        self._silent = True

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one connection."""
        far_reader, far_writer = await asyncio.open_connection(self._target.host, self._target.port)
        ways = [
            asyncio.create_task(self._carry(*way))
            for way in ((reader, far_writer), (far_reader, writer))
        ]
        self._tasks.update(ways)
        try:
            await asyncio.gather(*ways)
        finally:
            for task in ways:
                task.cancel()
            writer.close()
            far_writer.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                if not self._silent:
                    writer.write(data)
                    await writer.drain()
            writer.close()
        except ConnectionError:
            writer.close()


@asynccontextmanager
async def silent_proxy(target: HostPort) -> AsyncIterator[SilentProxy]:
    """Serve a SilentProxy."""
    proxy = SilentProxy(target)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.address = HostPort("127.0.0.1", server.sockets[0].getsockname()[1])
    try:
        yield proxy
    finally:
        server.close()
        for task in proxy._tasks:
            task.cancel()
        await asyncio.gather(*proxy._tasks, return_exceptions=True)
