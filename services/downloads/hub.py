"""A read-only hub over a folder laid out as ORGANISATION/NAME/files.

Each model has one branch, "main", at a commit that is a hash of its files' names and contents.
Nothing hidden and nothing outside the folder is shown.
"""

import asyncio
import hashlib
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.types import ASGIApp

from services.common.addresses import HostPort
from services.common.security import Security, current_security
from services.common.server import ListenError, announce, check_listen, until_stopped
from services.downloads.domain.card import license_of
from services.downloads.domain.names import is_safe_file
from services.downloads.hub_protocol import HubFile, HubModel, NotShown, hub_routes

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_HASH_CHUNK_BYTES = 2**20
# How long bodies may go on when the server stops.
_GRACE_SECONDS = 0.5


class HubFolder:
    """Reads models from the folder; a file is hashed again only when its size or time changed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()
        self._hashes: dict[tuple[Path, int, int], str] = {}
        # Several nodes ask at once for a model that is not hashed yet: hash it once.
        self._hashing = threading.Lock()

    def model(self, model_id: str, revision: str) -> HubModel:
        """See Shown; blocks while it hashes."""
        with self._hashing:
            model = self._model(model_id)
        if model is None:
            raise NotShown("RepoNotFound", "Repository not found")
        if revision not in ("main", model.commit):
            raise NotShown("RevisionNotFound", f"Invalid rev id: {revision}")
        return model

    def file(self, model_id: str, revision: str, name: str) -> tuple[str, HubFile]:
        """See Shown."""
        model = self.model(model_id, revision)
        if (file := model.files.get(name)) is None:
            raise NotShown("EntryNotFound", "Entry not found", commit=model.commit)
        return model.commit, file

    def _model(self, model_id: str) -> HubModel | None:
        organisation, _, name = model_id.partition("/")
        if not (_NAME.fullmatch(organisation) and _NAME.fullmatch(name)):
            return None
        root = self._folder / organisation / name
        if not root.is_dir() or not root.resolve().is_relative_to(self._folder):
            return None
        files = {
            path.relative_to(root).as_posix(): self._file(path)
            for path in sorted(root.rglob("*"))
            if path.is_file()
            and path.resolve().is_relative_to(root.resolve())
            and is_safe_file(path.relative_to(root).as_posix())
        }
        commit = hashlib.sha1(usedforsecurity=False)
        for file_name, file in files.items():
            commit.update(f"{file_name}\0{file.etag}\n".encode())
        if not files:
            return None
        return HubModel(model_id, commit.hexdigest(), files, _license(files.get("README.md")))

    def _file(self, path: Path) -> HubFile:
        """Return a file; every one is shown as if in large-file storage, by its SHA-256."""
        stat = path.stat()
        key = (path, stat.st_size, stat.st_mtime_ns)
        if key not in self._hashes:
            digest = hashlib.sha256()
            with path.open("rb") as file:
                while chunk := file.read(_HASH_CHUNK_BYTES):
                    digest.update(chunk)
            self._hashes[key] = digest.hexdigest()
        return HubFile(path, stat, self._hashes[key])


def _license(card: HubFile | None) -> str:
    if card is not None:
        with suppress(OSError):
            return license_of(card.path.read_text(errors="replace"))
    return ""


def hub_app(folder: Path) -> Starlette:
    """Return the hub over `folder` as an ASGI application."""
    return hub_routes(HubFolder(folder))


class HubServer:
    """Serves an ASGI application from inside a running event loop, and knows its real port."""

    def __init__(
        self,
        app: ASGIApp,
        listen: HostPort,
        *,
        security: Security | None = None,
        mutual: bool = True,
    ) -> None:
        """`security` None: as this process works. With TLS, `mutual` False takes everybody."""
        self._listen = listen
        self._security = security or current_security()
        tls = self._security.tls
        self._server = _Server(
            uvicorn.Config(
                app,
                log_config=None,
                log_level="warning",
                access_log=False,
                lifespan="off",
                date_header=False,
                server_header=False,
                ssl_context_factory=(
                    None if tls is None else lambda *_: tls.server_context(mutual=mutual)
                ),
            )
        )
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> HostPort:
        """Start serving; return the real address.

        Raises ListenError when it is taken, or reaches further than it may without TLS.
        """
        check_listen(self._listen, self._security)
        host, port = self._listen.host, self._listen.port
        # As gRPC does, so that a node's hub is wherever the node is.
        both = host in ("0.0.0.0", "::") and socket.has_dualstack_ipv6()
        try:
            # Resolved here, because bind alone would lose the zone of a link-local address.
            found = await asyncio.get_running_loop().getaddrinfo(
                "::" if both else host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            family, _, _, _, place = found[0]
            listening = socket.create_server(place[:4], family=family, dualstack_ipv6=both)
        except OSError as error:
            raise ListenError(
                f"Cannot listen on {self._listen}: {error.strerror}. Choose another address."
            ) from error
        address = HostPort(host, listening.getsockname()[1])
        self._task = asyncio.create_task(self._server.serve(sockets=[listening]))
        await self._server.ready.wait()
        return address

    async def stop(self) -> None:
        """End connections, within a second, and wait until the port is free."""
        if self._task is not None:
            self._server.ended.set()
            await self._task
            self._task = None


async def serve_hub(folder: Path, listen: HostPort) -> None:
    """Serve a folder until the process is told to stop."""
    # Programs of other makers read it: they know the CA, and have no certificate of it.
    server = HubServer(hub_app(folder), listen, mutual=False)
    announce("hub", await server.start())
    try:
        await until_stopped()
    finally:
        await server.stop()


class _Server(uvicorn.Server):
    """Says when it is ready, and ends when it is told to; uvicorn's own looks ten times a second
    whether it should. Leaves the process's signals to whoever runs the event loop."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()
        self.ended = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, then say so."""
        await super().startup(sockets)
        self.ready.set()

    async def main_loop(self) -> None:
        """Serve until told to end."""
        await self.ended.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the port; end connections now, or those that are sending a moment later."""
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        sending = set(self.server_state.tasks)
        if sending:
            await asyncio.wait(sending, timeout=_GRACE_SECONDS)
        for connection in list(self.server_state.connections):
            # Its reader is gone then: whoever sends to it stops.
            if connection.transport is not None:
                connection.transport.abort()
        if sending:
            await asyncio.wait(sending)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield
