"""A node's hub over its cache folder that serves other nodes badly, as it is told."""

import asyncio
from pathlib import Path

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.common.addresses import HostPort
from services.downloads.hub import HubServer
from services.downloads.hub_protocol import hub_routes
from services.downloads.worker.node_hub import CachedFiles

# How a node may be at fault with a weight file.
LIES = ("content", "size", "short", "etag", "unnamed size", "redirect")
FAULTS = ("stall", "slow", "die", "500", "404", "gone")


class LyingNode:
    """Serves a cache folder; `fault` is one of LIES or FAULTS, "" for none.

    `asked` holds the Range and Authorization headers of requests for weight files.
    """

    def __init__(self, folder: Path, fault: str = "") -> None:
        self.fault = fault
        self.asked: list[tuple[str, str]] = []
        self.sent_bytes = 0
        self._app = hub_routes(CachedFiles(folder))
        self._server: HubServer | None = None

    async def start(self) -> int:
        """Serve; return the port."""

        async def application(scope: Scope, receive: Receive, send: Send) -> None:
            await self._serve(self._app, scope, receive, send)

        self._server = HubServer(application, HostPort("127.0.0.1", 0))
        return (await self._server.start()).port

    async def stop(self) -> None:
        self.fault = ""
        if self._server is not None:
            await self._server.stop()
            self._server = None

    async def _serve(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        if not scope["path"].endswith(".safetensors"):
            await app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        self.asked.append(
            (headers.get(b"range", b"").decode(), headers.get(b"authorization", b"").decode())
        )
        match self.fault:
            case "500" | "404":
                await _status(send, int(self.fault))
            case "redirect":
                await _status(send, 302, (b"location", b"http://127.0.0.1:9/elsewhere"))
            case "gone":
                raise ConnectionResetError("on purpose")
            case _:
                await app(scope, receive, lambda message: self._spoil(message, send))

    async def _spoil(self, message: Message, send: Send) -> None:
        if message["type"] == "http.response.start":
            await send({**message, "headers": [*self._headers(message["headers"])]})
            return
        body, rest = message.get("body", b""), b""
        if self.fault == "content":
            body = body[:-1] + bytes([body[-1] ^ 1]) if body else body
        elif self.fault in ("short", "stall", "die"):
            body = body[: len(body) // 2]
        elif self.fault == "slow":
            body, rest = body[:1], body[1:]
        self.sent_bytes += len(body)
        await send({**message, "body": body, "more_body": message.get("more_body") or bool(body)})
        if self.fault == "short":
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        if self.fault == "die":
            raise ConnectionResetError("on purpose")
        while self.fault in ("stall", "slow"):
            await asyncio.sleep(0.1)
            if self.fault == "slow":
                piece, rest = rest[:1], rest[1:]
                self.sent_bytes += 1
                await send({"type": "http.response.body", "body": piece, "more_body": True})

    def _headers(self, headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        named = dict(headers)
        if self.fault == "size":
            named[b"content-length"] = str(int(named[b"content-length"]) + 1).encode()
        if self.fault == "etag":
            named[b"etag"] = named[b"x-linked-etag"] = b'"' + b"0" * 64 + b'"'
        if self.fault in ("unnamed size", "short"):
            named.pop(b"content-length", None)
        if self.fault == "short":
            named[b"transfer-encoding"] = b"chunked"
        return list(named.items())


async def _status(send: Send, status: int, *headers: tuple[bytes, bytes]) -> None:
    await send({"type": "http.response.start", "status": status, "headers": list(headers)})
    await send({"type": "http.response.body", "body": b""})
