"""The fetching child process as the worker sees it: started, given files, ended."""

import asyncio
import contextlib
import os
import sys
from asyncio.subprocess import Process

from services.common.errors import Reason, ShardringError
from services.downloads.worker.protocol import (
    FetchJob,
    FileOrder,
    Outcome,
    job_line,
    limit_line,
    order_line,
    outcome_from_line,
)

_MODULE = "services.downloads.worker.fetch"
_QUIET = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_VERBOSITY": "error"}
# No line of a child is longer.
_LINE_BYTES = 2**20


class Fetcher:
    """One child. Starting it takes a while, so it is started before it is known what to fetch."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._child: Process | None = None
        self._listening: asyncio.Task[None] | None = None
        self._running: dict[str, asyncio.Future[Outcome]] = {}

    @property
    def started(self) -> bool:
        """True from `start` on."""
        return self._child is not None

    async def start(self) -> None:
        """Start the process; it loads what it needs by itself."""
        self._child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            _MODULE,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_LINE_BYTES,
            env={**os.environ, **_QUIET, "HF_ENDPOINT": self._endpoint},
            # A Ctrl-C in a terminal is for the worker, which then ends the child.
            start_new_session=True,
        )
        self._listening = asyncio.create_task(self._listen(self._child))

    def begin(self, job: FetchJob) -> None:
        """Say what all files to come have in common; to be called once, before `fetch`."""
        self._say(job_line(job))

    def fetch(self, order: FileOrder) -> "asyncio.Future[Outcome]":
        """Have a file fetched; the future fails with DOWNLOAD_FAILED when the child ends."""
        outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._running[order.name] = outcome
        if self._listening is None or self._listening.done():
            self._fail_all("is gone")
        else:
            self._say(order_line(order))
        return outcome

    def limit(self, bytes_per_second: float) -> None:
        """Bound what the child receives; 0 removes the bound."""
        self._say(limit_line(bytes_per_second))

    async def close(self) -> None:
        """Kill the child, if there is one, and wait until it is gone."""
        if self._child is None or self._listening is None:
            return
        if self._child.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # It ended by itself just now.
                self._child.kill()
        await asyncio.shield(self._listening)

    def _say(self, line: str) -> None:
        assert self._child is not None
        assert self._child.stdin is not None
        # To a child that has just ended this does nothing; that it has is noticed by `_listen`.
        self._child.stdin.write(line.encode() + b"\n")

    async def _listen(self, child: Process) -> None:
        assert child.stdout is not None
        why = "ended"
        try:
            while line := await child.stdout.readline():
                outcome = outcome_from_line(line)
                waiting = self._running.pop(outcome.name, None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(outcome)
        except (ValueError, TypeError, KeyError) as error:
            why = f"wrote what is no outcome ({error!r})"
            child.kill()
        code = await child.wait()
        assert child.stdin is not None
        # By itself it would be closed only when it is next written to.
        child.stdin.close()
        self._fail_all(f"{why} with code {code}")

    def _fail_all(self, how: str) -> None:
        for waiting in self._running.values():
            if not waiting.done():
                waiting.set_exception(
                    ShardringError(
                        Reason.DOWNLOAD_FAILED,
                        f"The fetching process {how}. Start the download again: it goes on from "
                        "what is there.",
                    )
                )
        self._running.clear()
