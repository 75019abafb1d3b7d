"""smg as a child process: started, told of its workers, asked about them, and ended."""

import asyncio
import contextlib
import importlib.util
import json
import re
import secrets
import socket
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import click
import httpx2

from services.cli.gateway.child import GRACE_SECONDS
from services.cli.gateway.workers import manifest
from services.common.addresses import HostPort

_START_SECONDS = 60.0
_STOP_SECONDS = GRACE_SECONDS + 5.0
_ANSWER_SECONDS = 5.0
_POLL_SECONDS = 0.1
# A port that was free may be taken in the moment before smg takes it.
_PORT_ATTEMPTS = 3
_WORDS_KEPT = 5
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class SmgError(click.ClickException):
    """smg cannot be used; the message says why and what to do."""


@dataclass(frozen=True)
class SmgOptions:
    """How smg is run. Port 0: any free one. `more`: further options of `smg launch`."""

    host: str = "127.0.0.1"
    port: int = 0
    metrics_port: int = 0
    more: tuple[str, ...] = ()


@dataclass(frozen=True)
class Served:
    """What smg says it serves: keys of workers that take requests, and models it can tokenize."""

    ready_keys: frozenset[str]
    tokenizers: frozenset[str]


def check_installed() -> None:
    """Raise SmgError unless the extra `gateway` is installed."""
    if importlib.util.find_spec("smg") is None:
        raise SmgError("smg is not installed here. Install it: pip install 'shardring[gateway]'")


def has_tls(options: Sequence[str]) -> bool:
    """Return whether smg serves with TLS under these options."""
    return any(option.partition("=")[0] == "--tls-cert-path" for option in options)


class Smg:
    """A running smg; use as an async context manager.

    `log` is given each line that it writes once it answers; what it wrote before is in the error.
    """

    def __init__(self, options: SmgOptions, log: Callable[[str], None]) -> None:
        self._options = options
        self._log = log
        self._words: deque[str] = deque(maxlen=_WORDS_KEPT)
        # Whoever can send requests must not be able to register workers too.
        self._admin_key = secrets.token_hex(24)
        self._folder = tempfile.TemporaryDirectory(prefix="shardring-gateway-")
        self._manifest = Path(self._folder.name) / "workers.json"
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._is_alive = False
        self._http: httpx2.AsyncClient | None = None
        self.address = HostPort(options.host, options.port)

    async def __aenter__(self) -> Self:
        """Start smg; return once it answers. Raises SmgError when it does not."""
        try:
            await self._start()
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._stop()

    def set_workers(self, workers: Mapping[str, HostPort]) -> None:
        """Have smg use these workers from now on, by key, and no others."""
        draft = self._manifest.with_suffix(".new")
        draft.write_text(json.dumps(manifest(workers)))
        draft.replace(self._manifest)

    async def served(self) -> Served:
        """Ask smg what it serves. Raises SmgError when it does not answer."""
        workers, tokenizers = await asyncio.gather(self._get("workers"), self._get("v1/tokenizers"))
        return Served(
            frozenset(
                worker.get("labels", {}).get("smg.ai/discovery-id", "")
                for worker in workers.get("workers", ())
                if worker.get("status") == "ready"
            ),
            frozenset(one.get("name", "") for one in tokenizers.get("tokenizers", ())),
        )

    @property
    def _url(self) -> str:
        scheme = "https" if has_tls(self._options.more) else "http"
        return f"{scheme}://{HostPort(_asked_at(self.address.host), self.address.port)}"

    async def ended(self) -> SmgError:
        """Return, once smg ended by itself, why."""
        assert self._process is not None
        status = await self._process.wait()
        if self._reading is not None:
            await asyncio.wait([self._reading], timeout=1)
        words = "".join(f"\n  {line}" for line in self._words)
        return SmgError(f"smg ended with status {status}.{words}")

    async def _start(self) -> None:
        self.set_workers({})
        options = self._options
        for attempt in range(1, _PORT_ATTEMPTS + 1):
            port = options.port or _free_port(options.host)
            metrics_port = options.metrics_port or _free_port("127.0.0.1")
            self.address = HostPort(options.host, port)
            try:
                return await self._attempt(metrics_port)
            except SmgError:
                chosen = {port, metrics_port} - {options.port, options.metrics_port}
                lost = any(f":{number}: " in words for words in self._words for number in chosen)
                if attempt == _PORT_ATTEMPTS or not lost:
                    raise
                await self._stop_process()
        return None

    async def _attempt(self, metrics_port: int) -> None:
        self._words.clear()
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.cli.gateway.child", self._folder.name),
            *self._arguments(metrics_port),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            # Ctrl-C in a terminal is for the one that ends this in order.
            start_new_session=True,
        )
        self._reading = asyncio.create_task(self._read(), name="log of smg")
        self._http = httpx2.AsyncClient(
            base_url=self._url,
            # It is our own child, with whatever certificate it was given.
            verify=self._url.startswith("http:"),
            headers={"Authorization": f"Bearer {self._admin_key}"},
            timeout=_ANSWER_SECONDS,
            trust_env=False,
        )
        ended = asyncio.create_task(self.ended(), name="smg ended")
        living = asyncio.create_task(self._until_alive(), name="smg answers")
        try:
            await asyncio.wait(
                [ended, living], timeout=_START_SECONDS, return_when=asyncio.FIRST_COMPLETED
            )
            if ended.done():
                raise ended.result()
            if not living.done():
                raise SmgError(f"smg does not answer after {_START_SECONDS:.0f} s.")
            self._is_alive = True
        finally:
            for task in (ended, living):
                task.cancel()
            await asyncio.gather(ended, living, return_exceptions=True)

    def _arguments(self, metrics_port: int) -> Sequence[str]:
        return (
            *("--host", self.address.host, "--port", str(self.address.port)),
            *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)),
            *("--discovery-provider", "file", "--discovery-file", str(self._manifest)),
            # It is read at once when it changes; at this pace what failed is tried again.
            *("--discovery-check-interval-secs", "2"),
            *("--health-check-interval-secs", "5"),
            *("--shutdown-grace-period-secs", str(GRACE_SECONDS)),
            *("--control-plane-api-keys", f"shardring:shardring:admin:{self._admin_key}"),
            *("--log-level", "error"),
            *self._options.more,
        )

    async def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        while line := await _line(self._process.stdout):
            text = _COLOURS.sub("", line.decode(errors="replace")).rstrip()
            if text:
                self._words.append(text)
                if self._is_alive:
                    self._log(text)

    async def _until_alive(self) -> None:
        assert self._http is not None
        while True:
            with contextlib.suppress(httpx2.HTTPError):
                if (await self._http.get("/liveness")).is_success:
                    return
            await asyncio.sleep(_POLL_SECONDS)

    async def _get(self, path: str) -> Any:
        assert self._http is not None
        try:
            answer = await self._http.get(f"/{path}")
            answer.raise_for_status()
            return answer.json()
        except (httpx2.HTTPError, ValueError) as error:
            raise SmgError(f"smg does not tell its {path}: {error}") from error

    async def _stop(self) -> None:
        try:
            await self._stop_process()
        finally:
            # Whoever stands on the other side of the lifeline may have been faster.
            with contextlib.suppress(FileNotFoundError):
                self._folder.cleanup()

    async def _stop_process(self) -> None:
        process, self._process = self._process, None
        if self._http is not None:
            # smg waits for open connections, this one too.
            await self._http.aclose()
            self._http = None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            try:
                async with asyncio.timeout(_STOP_SECONDS):
                    await process.wait()
            except TimeoutError:
                self._log("smg did not end in time, and was killed.")
            finally:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])


async def _line(stream: asyncio.StreamReader) -> bytes:
    """Return the next line; of one that is too long to be read at once, the pieces."""
    try:
        return await stream.readuntil()
    except asyncio.IncompleteReadError as error:
        return error.partial
    except asyncio.LimitOverrunError as error:
        return await stream.readexactly(error.consumed)


def _free_port(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        try:
            probe.bind((host, 0))
        except OSError as error:
            raise SmgError(f"Cannot listen on {host}: {error.strerror}.") from error
        port: int = probe.getsockname()[1]
        return port


def _asked_at(host: str) -> str:
    """Return where a server on `host` is reached from this machine."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
