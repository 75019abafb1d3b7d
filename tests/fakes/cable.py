"""A cable between two processes of this machine, which can be cut."""

import asyncio
from contextlib import suppress

_CHUNK_BYTES = 2**16


class Cable:
    """Forwards TCP connections to a port of 127.0.0.1; once cut, it carries nothing any more, and
    neither end is told: connections stay open, and new ones are taken and left alone."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._works = asyncio.Event()
        self._works.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    @property
    def port(self) -> int:
        """The port at its near end."""
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    async def lay(self) -> None:
        """Start to forward."""
        self._server = await asyncio.start_server(self._take, "127.0.0.1", 0)

    def cut(self) -> None:
        """Lose all that comes from now on, either way."""
        self._works.clear()

    async def remove(self) -> None:
        """End all connections."""
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers:
            writer.close()

    async def _take(self, near: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        self._writers.add(back)
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        await self._works.wait()
        with suppress(OSError):
            far, on = await asyncio.open_connection("127.0.0.1", self._to)
            self._writers.add(on)
            ways = [self._carry(near, on), self._carry(far, back)]
            self._tasks |= (started := {asyncio.create_task(way) for way in ways})
            await asyncio.wait(started)
        back.close()

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await source.read(_CHUNK_BYTES):
                await self._works.wait()
                sink.write(data)
                await sink.drain()
        await self._works.wait()
        with suppress(OSError):
            sink.write_eof()
