"""A shard's child process, seen from its parent."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator

import psutil

from services.runner.child_protocol import Command, Event, Exit, decode, encode
from services.runner.domain.log_tail import KEPT_LINES, LogTail

logger = logging.getLogger(__name__)

_LINE_LIMIT_BYTES = 64 * 2**20
_LOG_READ_BYTES = 2**16
# A process that the child started may hold its standard error open after its end.
_LOG_END_SECONDS = 1.0
_HALT_CHECK_SECONDS = 2.0


class ChildProcess:
    """A running `services.runner.child`. Ends with its parent, whatever happens to either."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._process = process
        self._reader, self._writer = reader, writer
        self._log = LogTail()
        self._logging = asyncio.create_task(self._read_log())
        self._killed = False
        # How it ended, as the last line of its log.
        self._end: tuple[str, ...] = ()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def log_lines(self) -> tuple[str, ...]:
        """The last lines that it wrote to standard error, oldest first, and then how it ended."""
        return (*self._log.lines, *self._end)[-KEPT_LINES:]

    @property
    def last_words(self) -> str:
        """The line that tells most of its end; empty when it wrote none."""
        return self._log.last_words

    def send(self, command: Command) -> None:
        """Send a command; quiet when the child is gone, which `events` tells."""
        with contextlib.suppress(ConnectionError):
            self._writer.write(encode(command))

    async def events(self) -> AsyncIterator[Event]:
        """Yield what the child says, until it is gone."""
        # A child that dies with commands unread resets the connection instead of closing it.
        with contextlib.suppress(ConnectionError):
            while line := await self._reader.readline():
                yield decode(line)

    async def halted(self) -> bool:
        """Return True once it is stopped by a signal and stays so, False when it is gone."""
        try:
            process = psutil.Process(self.pid)
            halted = False
            while True:
                before = halted
                await asyncio.sleep(_HALT_CHECK_SECONDS)
                halted = process.status() == psutil.STATUS_STOPPED
                if halted and before:
                    return True
        except psutil.NoSuchProcess:
            return False

    async def stop(self, grace_seconds: float) -> None:
        """Ask it to end, kill it when it does not in time, and wait until it is gone."""
        self.send(Exit())
        await self.ended(grace_seconds)

    async def ended(self, grace_seconds: float) -> int:
        """Wait until it is gone, kill it when that takes too long, and return its exit status."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), grace_seconds)
        return await self.kill()

    async def kill(self) -> int:
        """Kill it unless it is gone, wait until it is, and return its exit status."""
        if self._process.returncode is None:
            self._killed = True
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        status = await self._process.wait()
        self._writer.close()
        await asyncio.wait([self._logging], timeout=_LOG_END_SECONDS)
        self._logging.cancel()
        await asyncio.wait([self._logging])
        self._end = (f"Process {self.pid} {self._how(status)}.",)
        return status

    def _how(self, status: int) -> str:
        if status >= 0:
            return f"exited with status {status}"
        if self._killed and status == -signal.SIGKILL:
            return "was killed by its node"
        names = {number.value: number.name for number in signal.Signals}
        return f"was killed by {names.get(-status, f'signal {-status}')}"

    async def _read_log(self) -> None:
        assert self._process.stderr is not None
        while data := await self._process.stderr.read(_LOG_READ_BYTES):
            for line in self._log.feed(data):
                logger.debug("shard %d: %s", self.pid, line)


async def start_child(
    instance_id: str,
    rank: int,
    node_id: str,
    trace_context: dict[str, str],
    *,
    module: str = "services.runner.child",
) -> ChildProcess:
    """Start a child for one shard. `trace_context` holds W3C trace headers."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module),
            *("--control-fd", str(theirs.fileno()), "--instance", instance_id),
            *("--rank", str(rank), "--node", node_id),
            pass_fds=[theirs.fileno()],
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            limit=_LINE_LIMIT_BYTES,
            # Ctrl-C in a terminal is for the node, which then ends its children in order.
            start_new_session=True,
            env=os.environ | {key.upper(): value for key, value in trace_context.items()},
        )
    reader, writer = await asyncio.open_connection(sock=ours, limit=_LINE_LIMIT_BYTES)
    return ChildProcess(process, reader, writer)
