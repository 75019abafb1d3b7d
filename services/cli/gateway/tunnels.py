"""Ways to heads with TLS for a gateway that knows none: ports of loopback, one for each worker."""

import asyncio
import contextlib
import logging

from services.common.addresses import HostPort
from services.common.errors import ShardringError
from services.common.tls import Tls, node_host

_CONNECT_SECONDS = 5.0
_PIECE_BYTES = 64 * 2**10

logger = logging.getLogger(__name__)


class Tunnels:
    """Leads connections to a port of this machine on to a node, which has to prove who it is.

    Whoever can connect to loopback here calls with this process's certificate.
    """

    def __init__(self, tls: Tls) -> None:
        self._tls = tls
        self._servers: dict[str, asyncio.Server] = {}
        self._connections: dict[str, set[asyncio.Task[None]]] = {}

    async def open(self, key: str, node_id: str, far: HostPort) -> HostPort:
        """Return where a node's port `far` is reached in the clear from now on."""
        connections = self._connections[key] = set()

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            connections.add(task)
            try:
                await self._lead(reader, writer, node_id, far)
            finally:
                connections.discard(task)

        server = self._servers[key] = await asyncio.start_server(accept, "127.0.0.1", 0)
        return HostPort("127.0.0.1", server.sockets[0].getsockname()[1])

    async def close(self, *keys: str) -> None:
        """End the ways of these workers, and what goes over them."""
        for key in keys:
            if server := self._servers.pop(key, None):
                server.close()
            if tasks := self._connections.pop(key, None):
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)

    async def close_all(self) -> None:
        """End all ways."""
        await self.close(*self._servers)

    async def _lead(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        node_id: str,
        far: HostPort,
    ) -> None:
        with contextlib.closing(writer):
            try:
                async with asyncio.timeout(_CONNECT_SECONDS):
                    context = self._tls.client_context()
                    context.set_alpn_protocols(["h2"])
                    far_reader, far_writer = await asyncio.open_connection(
                        far.host, far.port, ssl=context, server_hostname=node_host(node_id)
                    )
            except (OSError, TimeoutError, ShardringError) as error:
                # A closed connection to the caller.
                logger.warning("No way to node %s at %s: %s", node_id, far, error)
                return
            with contextlib.closing(far_writer):
                # HTTP/2 needs both ways: with one, all of it is over.
                ways = [
                    asyncio.create_task(_pass_on(reader, far_writer)),
                    asyncio.create_task(_pass_on(far_reader, writer)),
                ]
                try:
                    await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for way in ways:
                        way.cancel()
                    await asyncio.wait(ways)


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Pass on what comes until nothing more does; a broken connection is an end like others."""
    with contextlib.suppress(OSError):
        while piece := await reader.read(_PIECE_BYTES):
            writer.write(piece)
            await writer.drain()
