"""The hub's HTTP protocol, as far as huggingface_hub needs it to list and fetch models.

What is shown is up to a `Shown`: a folder of models (services.downloads.hub) or a node's cache
folder (services.downloads.worker.node_hub). Read-only. Protocol: https://huggingface.co/docs/hub/api.
"""

import asyncio
import hashlib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

logger = logging.getLogger(__name__)

# A body is read and sent in pieces of this size; Starlette's 64 KiB reach a quarter of the speed.
CHUNK_BYTES = 2**20
# A reader that takes nothing for so long is given up: it holds the place of another.
STALLED_SECONDS = 30.0
_RETRY_AFTER_SECONDS = 1
_SHA256_LENGTH = 64


@dataclass(frozen=True)
class HubFile:
    """One served file: where it lies, what the file system says of it, and its ETag.

    The ETag is the SHA-256 of the content (then the file is shown as one of large-file storage) or
    the SHA-1 that git gives it.
    """

    path: Path
    stat: os.stat_result
    etag: str

    @property
    def size_bytes(self) -> int:
        """Its size."""
        return self.stat.st_size


@dataclass(frozen=True)
class HubModel:
    """A served model at one commit; files by their path inside the repository."""

    model_id: str
    commit: str
    files: Mapping[str, HubFile]
    license: str = ""


class NotShown(Exception):
    """There is nothing to show. `code` is the hub's: RepoNotFound, RevisionNotFound or
    EntryNotFound, the last with the commit that was looked at."""

    def __init__(self, code: str, message: str, *, commit: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.commit = commit


class Shown(Protocol):
    """Models that are shown. Both methods block, and raise NotShown."""

    def model(self, model_id: str, revision: str) -> HubModel:
        """Return a model with all its files."""

    def file(self, model_id: str, revision: str, name: str) -> tuple[str, HubFile]:
        """Return the commit, and one file of it."""


class Bodies:
    """How many bodies are being sent, of as many as may be at a time (None: any number)."""

    def __init__(self, most: int | None = None) -> None:
        self.most = most
        self.count = 0

    @property
    def full(self) -> bool:
        """True when one more would be too many."""
        return self.most is not None and self.count >= self.most


class Body(FileResponse):
    """A file's bytes, or the ranges asked for; 503 when too many bodies are being sent."""

    chunk_size = CHUNK_BYTES

    def __init__(self, file: HubFile, headers: dict[str, str], bodies: Bodies) -> None:
        super().__init__(
            file.path,
            headers=headers,
            media_type="application/octet-stream",
            stat_result=file.stat,
        )
        self._bodies = bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        if scope["method"] == "HEAD":
            await super().__call__(scope, receive, send)
        elif self._bodies.full:
            await _busy()(scope, receive, send)
        else:
            self._bodies.count += 1
            try:
                await super().__call__(scope, receive, _in_time(send))
            except TimeoutError:
                logger.info("A reader of %s took nothing any more", self.path)
            finally:
                self._bodies.count -= 1


def hub_routes(shown: Shown, *, most_bodies: int | None = None) -> Starlette:
    """Return an ASGI application that shows models; `most_bodies` at a time are sent."""
    bodies = Bodies(most_bodies)

    async def info(request: Request) -> Response:
        model = await asyncio.to_thread(shown.model, *_asked(request))
        return JSONResponse(_info(model, sizes=request.query_params.get("blobs") is not None))

    async def tree(request: Request) -> Response:
        model = await asyncio.to_thread(shown.model, *_asked(request))
        below = request.path_params.get("folder", "")
        entries = _tree(model, below, request.query_params.get("recursive", "").lower() == "true")
        if not entries and below:
            raise NotShown("EntryNotFound", f"{below} does not exist", commit=model.commit)
        return JSONResponse(entries)

    async def resolve(request: Request) -> Response:
        commit, file = await asyncio.to_thread(
            shown.file, *_asked(request), request.path_params["path"]
        )
        headers = {
            "ETag": f'"{file.etag}"',
            "X-Repo-Commit": commit,
            "X-Linked-ETag": f'"{file.etag}"',
            "X-Linked-Size": str(file.size_bytes),
        }
        return Body(file, headers, bodies)

    routes = []
    for model in ("{organisation}/{name}", "{name}"):
        api = f"/api/models/{model}"
        routes += [
            Route(api, info),
            Route(f"{api}/revision/{{revision}}", info),
            Route(f"{api}/tree/{{revision}}", tree),
            Route(f"{api}/tree/{{revision}}/{{folder:path}}", tree),
            Route(f"/{model}/resolve/{{revision}}/{{path:path}}", resolve),
        ]
    return Starlette(routes=routes, exception_handlers={NotShown: _not_shown})


def _asked(request: Request) -> tuple[str, str]:
    """Return the model id and the revision of a request."""
    names = request.path_params
    parts = [names[part] for part in ("organisation", "name") if part in names]
    return "/".join(parts), names.get("revision", "main")


async def _not_shown(request: Request, error: Exception) -> Response:
    assert isinstance(error, NotShown)
    headers = {"X-Error-Code": error.code, "X-Error-Message": _header_text(str(error))}
    if error.commit:
        headers["X-Repo-Commit"] = error.commit
    return JSONResponse({"error": str(error)}, status_code=404, headers=headers)


def _header_text(text: str) -> str:
    """Return text that repeats what was asked as a header can carry it."""
    return "".join(char if " " <= char <= "~" else "?" for char in text[:200])


def _busy() -> Response:
    message = "This node is sending as many files as it may. Ask again."
    headers = {"Retry-After": str(_RETRY_AFTER_SECONDS), "X-Error-Message": message}
    return JSONResponse({"error": message}, status_code=503, headers=headers)


def _in_time(send: Send) -> Send:
    """Return `send` for one body; it raises TimeoutError when its reader takes nothing."""

    async def send_in_time(message: Message) -> None:
        async with asyncio.timeout(STALLED_SECONDS):
            await send(message)

    return send_in_time


def _info(model: HubModel, *, sizes: bool) -> dict[str, Any]:
    siblings = [
        {"rfilename": name, **(_blob(file) if sizes else {})} for name, file in model.files.items()
    ]
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
        "cardData": {"license": model.license} if model.license else {},
    }


def _blob(file: HubFile) -> dict[str, Any]:
    if len(file.etag) != _SHA256_LENGTH:
        return {"size": file.size_bytes, "blobId": file.etag}
    lfs = {"size": file.size_bytes, "sha256": file.etag, "pointerSize": 134}
    return {"size": file.size_bytes, "blobId": file.etag[:40], "lfs": lfs}


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
        }
        if "lfs" in blob:
            lfs = {"oid": file.etag, "size": file.size_bytes, "pointerSize": 134}
            entries[name]["lfs"] = lfs
    depth = start.count("/")
    return [e for path, e in sorted(entries.items()) if recursive or path.count("/") == depth]
