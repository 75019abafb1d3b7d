"""A hub between the real one and the client that misbehaves as it is told, and counts everything.

As a process of its own, which serves a folder at a bounded speed and says what it sent:

    python -m tests.fakes.faulty_hub FOLDER BYTES_PER_SECOND
"""

import asyncio
import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qs, urlencode

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.common.addresses import HostPort
from services.common.server import announce, until_stopped
from services.downloads.hub import HubFolder, HubServer, hub_app
from tests.fakes.spoiling import Faults, Pace, Spoiler

# What is asked for: a list of files; what a file is; the beginning of one, as facts are read by; a
# weight file's content, from wherever on; that of another file.
Kind = Literal["listing", "head", "facts", "body", "text"]
COUNTS_PATH = "/counts"


@dataclass
class Seen:
    """One request. `name`: the file, or the path of a listing. `host`: "hub" or "storage"."""

    method: str
    name: str
    range: str
    kind: Kind = "body"
    host: str = "hub"
    authorization: str = ""
    commit: str = ""
    status: int = 0
    sent_bytes: int = 0
    # When it came, by time.time().
    time: float = field(default_factory=time.time)


@dataclass
class Refusal:
    """What the next requests of a kind get in place of an answer; headers are made for each."""

    kind: Kind
    status: int
    times: int
    headers: Callable[[], Mapping[str, str]]


@dataclass
class FaultyHub:
    """The real hub application over a folder, with faults, on a port of its own.

    `seen` holds the requests about files, `listings` those for lists of them.
    """

    folder: Path
    faults: Faults = field(default_factory=Faults)
    seen: list[Seen] = field(default_factory=list)
    listings: list[Seen] = field(default_factory=list)
    stalled: asyncio.Event = field(default_factory=asyncio.Event)
    address: HostPort = field(default_factory=lambda: HostPort("127.0.0.1", 0))
    # Another host, where bodies lie while `faults.redirect` is set.
    storage: HostPort = field(default_factory=lambda: HostPort("127.0.0.1", 0))
    # Where the pages of a tree after the first are said to be; this hub, when not set.
    next_page_host: HostPort | None = None

    def __post_init__(self) -> None:
        self._refusals: list[Refusal] = []
        self._servers: list[HubServer] = []
        self._pace = Pace()
        self._newest: ASGIApp = hub_app(self.folder)
        # Applications that serve a commit which "main" has left, by that commit.
        self._older: dict[str, ASGIApp] = {}

    @property
    def endpoint(self) -> str:
        return f"http://{self.address}"

    async def start(self) -> None:
        """Start, again on the same ports after a stop."""
        hub = HubServer(_application(self._hub), self.address)
        storage = HubServer(_application(self._storage), self.storage)
        self.address, self.storage = await hub.start(), await storage.start()
        self._servers = [hub, storage]

    async def stop(self) -> None:
        for server in self._servers:
            await server.stop()
        self._servers = []

    def fetched(self) -> set[str]:
        """Return the files whose content was asked for."""
        return {request.name for request in self.seen if request.method == "GET"}

    def asked(self, kind: Kind) -> list[Seen]:
        """Return the requests of a kind so far."""
        return [request for request in [*self.listings, *self.seen] if request.kind == kind]

    def refuse(
        self,
        kind: Kind,
        status: int,
        times: int = 1,
        headers: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        """Answer the next `times` requests of a kind with a status and nothing else."""
        self._refusals.append(Refusal(kind, status, times, headers))

    def relent(self) -> None:
        """Refuse nothing more."""
        self._refusals.clear()

    def push(self, folder: Path, *models: str) -> None:
        """Move "main" of these models to what lies in another folder; their commits stay."""
        for model in models:
            commit = HubFolder(self.folder).model(model, "main").commit
            self._older[commit] = self._newest
        self.folder, self._newest = folder, hub_app(folder)

    async def _hub(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if path == COUNTS_PATH:
            await _answer(send, 200, {}, json.dumps(self._counts()).encode())
        elif "/resolve/" in path:
            await self._file(scope, receive, send, "hub")
        elif path.startswith("/api/models/"):
            await self._list(scope, receive, send)
        else:
            await self._newest(scope, receive, send)

    async def _storage(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._file(scope, receive, send, "storage")

    async def _list(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = _request(scope, scope["path"], "listing", "hub")
        self.listings.append(request)
        send = _noting(request, send)
        if await self._refused(request, send):
            return
        if self.faults.private_to and request.authorization != f"Bearer {self.faults.private_to}":
            # So the hub hides what is there from those that it is not for.
            await _answer(send, 401, {"X-Error-Code": "RepoNotFound"})
            return
        change = self._page if "/tree/" in request.name else self._info
        await self._app(scope)(scope, receive, _rewriting(send, lambda text: change(scope, text)))

    async def _file(self, scope: Scope, receive: Receive, send: Send, host: str) -> None:
        name = scope["path"].split("/resolve/")[1].split("/", 1)[1]
        request = _request(scope, name, _kind(scope, name), host)
        self.seen.append(request)
        send, faults = _noting(request, send), self.faults
        if await self._refused(request, send):
            return
        granted = faults.gated_to or faults.private_to
        if host == "hub" and granted and request.authorization != f"Bearer {granted}":
            status = 403 if request.authorization else 401
            code = "GatedRepo" if faults.gated_to else "RepoNotFound"
            await _answer(send, status, {"X-Error-Code": code})
            return
        app = self._app(scope)
        if faults.redirect and host == "hub" and _is_weights(name):
            await app({**scope, "method": "HEAD"}, receive, self._redirecting(scope, send))
        elif request.kind != "body":
            await app(scope, receive, send)
        else:
            spoiler = Spoiler(faults, self._pace, self.stalled, send)
            if (error := spoiler.error(request.range)) is not None:
                await _answer(send, error, {})
                return
            if faults.ignore_range:
                scope = {**scope, "headers": [h for h in scope["headers"] if h[0] != b"range"]}
            await app(scope, receive, spoiler.send)

    async def _refused(self, request: Seen, send: Send) -> bool:
        for refusal in self._refusals:
            if refusal.kind == request.kind and refusal.times > 0:
                refusal.times -= 1
                await _answer(send, refusal.status, refusal.headers())
                return True
        return False

    def _app(self, scope: Scope) -> ASGIApp:
        """Return who serves the commit that a path names, or else the newest."""
        for commit, app in self._older.items():
            if commit in scope["path"].split("/"):
                return app
        return self._newest

    def _redirecting(self, scope: Scope, send: Send) -> Send:
        """Answer as the hub does whose bodies lie elsewhere: what the file is, and where."""

        async def redirect(message: Message) -> None:
            if message["type"] == "http.response.start":
                kept = [h for h in message["headers"] if h[0].startswith((b"x-", b"etag"))]
                location = f"http://{self.storage}{scope['path']}?signed=yes".encode()
                headers = [*kept, (b"location", location), (b"content-length", b"0")]
                message = {**message, "status": 302, "headers": headers}
            else:
                message = {**message, "body": b"", "more_body": False}
            await send(message)

        return redirect

    def _info(self, scope: Scope, text: bytes) -> tuple[bytes, Mapping[str, str]]:
        answer = json.loads(text)
        if "siblings" in answer:
            answer["siblings"] = answer["siblings"][: self.faults.listed_files]
            answer["gated"] = "manual" if self.faults.gated_to else False
        return json.dumps(answer).encode(), {}

    def _page(self, scope: Scope, text: bytes) -> tuple[bytes, Mapping[str, str]]:
        entries, size = json.loads(text), self.faults.page_size
        if not isinstance(entries, list) or size is None:
            return text, {}
        query = parse_qs(scope["query_string"].decode())
        begin = int(query.pop("cursor", ["0"])[0])
        links = {}
        if begin + size < len(entries):
            host = self.next_page_host or self.address
            following = urlencode({**query, "cursor": [begin + size]}, doseq=True)
            links["Link"] = f'<http://{host}{scope["path"]}?{following}>; rel="next"'
        return json.dumps(entries[begin : begin + size]).encode(), links

    def _counts(self) -> dict[str, Any]:
        sent: dict[str, int] = {}
        for request in self.seen:
            sent[request.name] = sent.get(request.name, 0) + request.sent_bytes
        return {"listings": len(self.listings), "requests": len(self.seen), "sent_bytes": sent}


def _application(answer: ASGIApp) -> ASGIApp:
    """Return a bound method as uvicorn can tell what it is."""

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        await answer(scope, receive, send)

    return application


def _is_weights(name: str) -> bool:
    return name.endswith(".safetensors")


def _kind(scope: Scope, name: str) -> Kind:
    if scope["method"] == "HEAD":
        return "head"
    wanted = dict(scope["headers"]).get(b"range", b"").decode()
    if wanted.startswith("bytes=0-") and wanted != "bytes=0-":
        return "facts"
    return "body" if _is_weights(name) else "text"


def _request(scope: Scope, name: str, kind: Kind, host: str) -> Seen:
    headers = dict(scope["headers"])
    _, _, at = scope["path"].partition("/resolve/")
    return Seen(
        scope["method"],
        name,
        headers.get(b"range", b"").decode(),
        kind,
        host,
        headers.get(b"authorization", b"").decode(),
        at.split("/")[0],
    )


def _noting(request: Seen, send: Send) -> Send:
    async def note(message: Message) -> None:
        if message["type"] == "http.response.start":
            request.status = message["status"]
        await send(message)
        if request.method != "HEAD":
            request.sent_bytes += len(message.get("body", b""))

    return note


def _rewriting(send: Send, change: Callable[[bytes], tuple[bytes, Mapping[str, str]]]) -> Send:
    """Pass on an answer of JSON as `change` makes it, with the headers it adds."""
    body, first = bytearray(), dict[str, Any]()

    async def rewrite(message: Message) -> None:
        if message["type"] == "http.response.start":
            first.update(message)
            return
        body.extend(message.get("body", b""))
        if message.get("more_body"):
            return
        text, more = change(bytes(body)) if first["status"] == 200 else (bytes(body), {})
        names = {name.decode(): value.decode() for name, value in first["headers"]}
        names.pop("content-length", None)
        await _answer(send, first["status"], {**names, **more}, text)

    return rewrite


async def _answer(send: Send, status: int, headers: Mapping[str, str], body: bytes = b"") -> None:
    headers = {**headers, "content-length": str(len(body))}
    wire = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": wire})
    await send({"type": "http.response.body", "body": body})


async def main(folder: Path, bytes_per_second: float) -> None:
    """Serve until told to stop."""
    hub = FaultyHub(folder)
    hub.faults = replace(hub.faults, bytes_per_second=bytes_per_second)
    await hub.start()
    announce("faulty hub", hub.address)
    try:
        await until_stopped()
    finally:
        await hub.stop()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), float(sys.argv[2])))
