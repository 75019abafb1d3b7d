"""A hub between the real one and the client that misbehaves as it is told."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.common.addresses import HostPort
from services.downloads.hub import HubServer, hub_app


@dataclass
class Faults:
    """What goes wrong with bodies of weight files; counts are of requests still to be spoiled."""

    stall_after: int | None = None
    cut_after: int | None = None
    cuts: int = 0
    errors: int = 0
    error_code: int = 503
    ignore_range: bool = False
    spoil_byte: bool = False


@dataclass
class Seen:
    """One request for a file's content."""

    method: str
    name: str
    range: str


@dataclass
class FaultyHub:
    """The real hub application over a folder, with faults, on a port of its own."""

    folder: Path
    faults: Faults = field(default_factory=Faults)
    seen: list[Seen] = field(default_factory=list)
    stalled: asyncio.Event = field(default_factory=asyncio.Event)
    address: HostPort = field(default_factory=lambda: HostPort("127.0.0.1", 0))
    _server: HubServer | None = None

    @property
    def endpoint(self) -> str:
        return f"http://{self.address}"

    async def start(self) -> None:
        """Start, again on the same port after a stop."""
        self._server = HubServer(self._spoil(hub_app(self.folder)), self.address)
        self.address = await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop()
            self._server = None

    def fetched(self) -> set[str]:
        """Return the files whose content was asked for."""
        return {request.name for request in self.seen if request.method == "GET"}

    def _spoil(self, app: ASGIApp) -> ASGIApp:
        async def spoiled(scope: Scope, receive: Receive, send: Send) -> None:
            path = scope.get("path", "")
            if "/resolve/" not in path:
                await app(scope, receive, send)
                return
            headers = dict(scope["headers"])
            wanted = headers.get(b"range", b"").decode()
            name = path.split("/resolve/")[1].split("/", 1)[1]
            self.seen.append(Seen(scope["method"], name, wanted))
            # Headers are read by short requests from 0; leave those, as facts come from them.
            whole = scope["method"] == "GET" and not wanted.startswith("bytes=0-")
            if not (whole and name.endswith(".safetensors")):
                await app(scope, receive, send)
                return
            faults = self.faults
            if faults.errors > 0:
                faults.errors -= 1
                await send(
                    {"type": "http.response.start", "status": faults.error_code, "headers": []}
                )
                await send({"type": "http.response.body", "body": b""})
                return
            if faults.ignore_range:
                scope = {**scope, "headers": [h for h in scope["headers"] if h[0] != b"range"]}
            await app(scope, receive, self._spoiling(faults, send))

        return spoiled

    def _spoiling(self, faults: Faults, send: Send) -> Send:
        sent = 0

        async def spoil(message: Message) -> None:
            nonlocal sent
            body = message.get("body", b"")
            if body and faults.spoil_byte:
                faults.spoil_byte = False
                message = {**message, "body": bytes([body[0] ^ 1]) + body[1:]}
            if body and faults.cuts > 0 and faults.cut_after is not None:
                left = faults.cut_after - sent
                if len(body) >= left:
                    faults.cuts -= 1
                    await send({**message, "body": body[:left], "more_body": True})
                    raise ConnectionResetError("cut on purpose")
            if body and faults.stall_after is not None and sent >= faults.stall_after:
                self.stalled.set()
                while faults.stall_after is not None:
                    await asyncio.sleep(0.02)
            sent += len(body)
            await send(message)

        return spoil
