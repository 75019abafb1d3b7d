"""A read-only hub over a folder laid out as ORGANISATION/NAME/files.

Speaks the part of the hub's HTTP protocol that huggingface_hub needs to list and fetch models:
https://huggingface.co/docs/hub/api. Each model has one branch, "main", at a commit that is a
hash of its files' names and contents. Nothing hidden and nothing outside the folder is shown.
"""

import asyncio
import hashlib
import logging
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from services.common.addresses import HostPort
from services.common.server import ListenError, announce, until_stopped
from services.downloads.domain.card import license_of
from services.downloads.domain.names import is_safe_file

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_HASH_CHUNK_BYTES = 2**20


@dataclass(frozen=True)
class HubFile:
    """One served file: where it lies, its size and the SHA-256 of its content."""

    path: Path
    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class HubModel:
    """A served model at its only commit; files by their path inside the repository."""

    model_id: str
    commit: str
    files: dict[str, HubFile]


class HubFolder:
    """Reads models from the folder; a file is hashed again only when its size or time changed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()
        self._hashes: dict[tuple[Path, int, int], str] = {}
        # Several nodes ask at once for a model that is not hashed yet: hash it once.
        self._hashing = threading.Lock()

    def model(self, organisation: str, name: str) -> HubModel | None:
        """Return a model as it now is; None when there is none. Blocks while it hashes."""
        with self._hashing:
            return self._model(organisation, name)

    def _model(self, organisation: str, name: str) -> HubModel | None:
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
            commit.update(f"{file_name}\0{file.sha256}\n".encode())
        return HubModel(f"{organisation}/{name}", commit.hexdigest(), files) if files else None

    def _file(self, path: Path) -> HubFile:
        stat = path.stat()
        key = (path, stat.st_size, stat.st_mtime_ns)
        if key not in self._hashes:
            digest = hashlib.sha256()
            with path.open("rb") as file:
                while chunk := file.read(_HASH_CHUNK_BYTES):
                    digest.update(chunk)
            self._hashes[key] = digest.hexdigest()
        return HubFile(path, stat.st_size, self._hashes[key])


def hub_app(folder: Path) -> Starlette:
    """Return the hub over `folder` as an ASGI application."""
    hub = HubFolder(folder)

    async def find(request: Request) -> HubModel | Response:
        names = request.path_params
        model = await asyncio.to_thread(hub.model, names["organisation"], names["name"])
        if model is None:
            return _not_found("RepoNotFound", "Repository not found")
        if names.get("revision", "main") not in ("main", model.commit):
            return _not_found("RevisionNotFound", f"Invalid rev id: {names['revision']}")
        return model

    async def info(request: Request) -> Response:
        model = await find(request)
        if isinstance(model, Response):
            return model
        return JSONResponse(_info(model, sizes=request.query_params.get("blobs") is not None))

    async def tree(request: Request) -> Response:
        model = await find(request)
        if isinstance(model, Response):
            return model
        below = request.path_params.get("folder", "")
        entries = _tree(model, below, request.query_params.get("recursive", "").lower() == "true")
        if not entries and below:
            return _not_found("EntryNotFound", f"{below} does not exist on main")
        return JSONResponse(entries)

    async def resolve(request: Request) -> Response:
        model = await find(request)
        if isinstance(model, Response):
            return model
        if (file := model.files.get(request.path_params["path"])) is None:
            return _not_found("EntryNotFound", "Entry not found", commit=model.commit)
        headers = {
            "ETag": f'"{file.sha256}"',
            "X-Repo-Commit": model.commit,
            "X-Linked-ETag": f'"{file.sha256}"',
            "X-Linked-Size": str(file.size_bytes),
        }
        return FileResponse(file.path, media_type="application/octet-stream", headers=headers)

    api = "/api/models/{organisation}/{name}"
    return Starlette(
        routes=[
            Route(api, info),
            Route(f"{api}/revision/{{revision}}", info),
            Route(f"{api}/tree/{{revision}}", tree),
            Route(f"{api}/tree/{{revision}}/{{folder:path}}", tree),
            Route("/{organisation}/{name}/resolve/{revision}/{path:path}", resolve),
        ]
    )


class HubServer:
    """Serves an ASGI application from inside a running event loop, and knows its real port."""

    def __init__(self, app: ASGIApp, listen: HostPort) -> None:
        self._listen = listen
        self._server = _Server(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=1,
            )
        )
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> HostPort:
        """Start serving; return the real address. Raises ListenError when it is taken."""
        host, port = self._listen.host, self._listen.port
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listening = socket.create_server((host, port), family=family)
        except OSError as error:
            raise ListenError(
                f"Cannot listen on {self._listen}: {error.strerror}. Choose another address."
            ) from error
        address = HostPort(host, listening.getsockname()[1])
        self._task = asyncio.create_task(self._server.serve(sockets=[listening]))
        await self._server.ready.wait()
        return address

    async def stop(self) -> None:
        """End connections and wait until the port is free."""
        if self._task is not None:
            self._server.should_exit = True
            await self._task
            self._task = None


async def serve_hub(folder: Path, listen: HostPort) -> None:
    """Serve a folder until the process is told to stop."""
    server = HubServer(hub_app(folder), listen)
    announce("hub", await server.start())
    try:
        await until_stopped()
    finally:
        await server.stop()


class _Server(uvicorn.Server):
    """Says when it is ready; leaves the process's signals to whoever runs the event loop."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, then say so."""
        await super().startup(sockets)
        self.ready.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


def _not_found(code: str, message: str, *, commit: str = "") -> Response:
    headers = {"X-Error-Code": code, "X-Error-Message": message}
    if commit:
        headers["X-Repo-Commit"] = commit
    return JSONResponse({"error": message}, status_code=404, headers=headers)


def _info(model: HubModel, *, sizes: bool) -> dict[str, Any]:
    siblings = [
        {"rfilename": name, **(_blob(file) if sizes else {})} for name, file in model.files.items()
    ]
    license_name = ""
    if card := model.files.get("README.md"):
        with suppress(OSError):
            license_name = license_of(card.path.read_text(errors="replace"))
    return {
        "id": model.model_id,
        "modelId": model.model_id,
        "sha": model.commit,
        "private": False,
        "gated": False,
        "disabled": False,
        "tags": [],
        "downloads": 0,
        "likes": 0,
        "siblings": siblings,
        "cardData": {"license": license_name} if license_name else {},
    }


def _blob(file: HubFile) -> dict[str, Any]:
    # Every file is shown as if in large-file storage, whose ETag is the content's SHA-256.
    lfs = {"size": file.size_bytes, "sha256": file.sha256, "pointerSize": 134}
    return {"size": file.size_bytes, "blobId": file.sha256[:40], "lfs": lfs}


def _tree(model: HubModel, below: str, recursive: bool) -> list[dict[str, Any]]:
    entries: dict[str, dict[str, Any]] = {}
    start = f"{below.strip('/')}/" if below else ""
    for name, file in model.files.items():
        if not name.startswith(start):
            continue
        *folders, _ = name[len(start) :].split("/")
        for depth in range(1, len(folders) + 1):
            path = start + "/".join(folders[:depth])
            oid = hashlib.sha1(path.encode(), usedforsecurity=False).hexdigest()
            entries[path] = {"type": "directory", "path": path, "oid": oid, "size": 0}
        blob = _blob(file)
        entries[name] = {
            "type": "file",
            "path": name,
            "size": file.size_bytes,
            "oid": blob["blobId"],
            "lfs": {"oid": file.sha256, "size": file.size_bytes, "pointerSize": 134},
        }
    depth = start.count("/")
    return [e for path, e in sorted(entries.items()) if recursive or path.count("/") == depth]
