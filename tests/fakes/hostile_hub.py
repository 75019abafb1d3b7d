"""A hub that says whatever a test wants: any bytes under any name, any size, without an end."""

import asyncio
import hashlib
import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

COMMIT = "a" * 40
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")


@dataclass
class HostileModel:
    """What the hub says of one model.

    `sizes` are announced in place of the true ones; `info` is the whole answer about the model in
    place of a made one; `endless` files never end, a MiB at a time; `dribble`: the answer about the
    model comes a byte now and then; `loop`: every file is somewhere else, for ever.
    """

    files: dict[str, bytes]
    sizes: dict[str, Any] = field(default_factory=dict)
    card: Any = None
    info: bytes | None = None
    endless: bool = False
    dribble: bool = False
    loop: bool = False


def hostile_hub(models: dict[str, HostileModel]) -> Starlette:
    """Return the hub; models are called "evil/NAME"."""

    async def info(request: Request) -> Response:
        name = request.path_params["name"]
        model = models[name]
        if model.dribble:
            return StreamingResponse(_forever(b" ", 0.2))
        if model.info is not None:
            return Response(model.info)
        names = {**model.files, **model.sizes}
        answer = {
            "id": f"evil/{name}",
            "sha": COMMIT,
            "siblings": [_listed(model, file) for file in names],
            "cardData": model.card,
        }
        return Response(json.dumps(answer))

    async def tree(request: Request) -> Response:
        model = models[request.path_params["name"]]
        listed = [_listed(model, file) for file in {**model.files, **model.sizes}]
        entries = [
            {"type": "file", "path": one["rfilename"], "size": one["size"], "oid": one["blobId"]}
            for one in listed
        ]
        return Response(json.dumps(entries))

    async def resolve(request: Request) -> Response:
        model, path = models[request.path_params["name"]], request.path_params["path"]
        if model.loop:
            return RedirectResponse(str(request.url))
        body = model.files.get(path)
        if body is None:
            return Response(status_code=404, headers={"X-Error-Code": "EntryNotFound"})
        headers = {"ETag": f'"{_hash(body)}"', "X-Repo-Commit": COMMIT}
        if request.method == "HEAD":
            return Response(
                headers=headers
                | {
                    "Content-Length": str(len(body)),
                    "X-Linked-Size": str(model.sizes.get(path, len(body))),
                }
            )
        wanted = _RANGE.fullmatch(request.headers.get("Range", ""))
        if wanted is None and model.endless and path.endswith(".safetensors"):
            return StreamingResponse(_forever(bytes(2**20), 0.001), headers=headers)
        if wanted is None:
            return Response(body, headers=headers)
        first, last = int(wanted[1]), int(wanted[2] or len(body) - 1)
        headers["Content-Range"] = f"bytes {first}-{min(last, len(body) - 1)}/{len(body)}"
        return Response(body[first : last + 1], 206, headers)

    return Starlette(
        routes=[
            Route("/api/models/evil/{name}/revision/{revision}", info),
            Route("/api/models/evil/{name}/tree/{revision}", tree),
            Route("/evil/{name}/resolve/{revision}/{path:path}", resolve, methods=["GET", "HEAD"]),
        ]
    )


def _listed(model: HostileModel, name: str) -> dict[str, Any]:
    body = model.files.get(name, b"")
    return {
        "rfilename": name,
        "size": model.sizes.get(name, len(body)),
        "blobId": _hash(body),
    }


def _hash(body: bytes) -> str:
    """Return what git calls a blob."""
    return hashlib.sha1(b"blob %d\0" % len(body) + body, usedforsecurity=False).hexdigest()


async def _forever(piece: bytes, pause_seconds: float) -> AsyncIterator[bytes]:
    while True:
        yield piece
        await asyncio.sleep(pause_seconds)
