"""What goes wrong with answers of a faulty hub, and how a weight file's content is spoiled."""

import asyncio
import time
from dataclasses import dataclass

from starlette.types import Message, Send

_PIECE_BYTES = 2**16
# What a sender may catch up after it was held up.
_BURST_SECONDS = 0.05


@dataclass
class Faults:
    """What goes wrong with bodies of weight files, but for the last five.

    `cuts`, `errors`, `lengths` and `spoil_byte` are numbers of requests still to be spoiled.
    """

    # No further byte after this many of a body, for as long as it is set.
    stall_after: int | None = None
    # The connection is cut after this many bytes of a body.
    cut_after: int | None = None
    cuts: int = 0
    # No body but this status.
    errors: int = 0
    error_code: int = 503
    # A body of this many bytes more, or fewer, than the file has. The answer announces as many,
    # or none with `unannounced`.
    lengthen: int = 0
    lengths: int = 0
    unannounced: bool = False
    # A range from other than 0 is answered by the whole file, or by 416.
    ignore_range: bool = False
    refuse_range: bool = False
    # The first byte of a body is another one.
    spoil_byte: int = 0
    # Speed in all, and of each request.
    bytes_per_second: float | None = None
    request_bytes_per_second: float | None = None

    # Bodies of weight files lie on another host.
    redirect: bool = False
    # Contents are for those with this token; with `private_to` the mere names of files too.
    gated_to: str = ""
    private_to: str = ""
    # Entries on a page of a tree, and in the answer about a model.
    page_size: int | None = None
    listed_files: int | None = None


class Pace:
    """Shares a speed among all that send."""

    def __init__(self) -> None:
        self._free = 0.0

    async def take(self, count: int, bytes_per_second: float) -> None:
        """Wait until so many bytes more may have been sent."""
        now = time.monotonic()
        self._free = max(self._free, now - _BURST_SECONDS) + count / bytes_per_second
        await asyncio.sleep(max(0.0, self._free - now))


class Spoiler:
    """Sends one body, spoiled."""

    def __init__(self, faults: Faults, pace: Pace, stalled: asyncio.Event, send: Send) -> None:
        self._faults = faults
        self._paces = (pace, Pace())
        self._stalled = stalled
        self._send = send
        self._sent = 0
        self._added = 0
        # Where a body ends that is to be shorter.
        self._limit: int | None = None
        if faults.lengths > 0:
            faults.lengths -= 1
            self._added = faults.lengthen

    def error(self, wanted_range: str) -> int | None:
        """Return the status that the request gets in place of a body."""
        if self._faults.errors > 0:
            self._faults.errors -= 1
            return self._faults.error_code
        return 416 if self._faults.refuse_range and wanted_range else None

    async def send(self, message: Message) -> None:
        """Pass a message of the answer on."""
        if message["type"] == "http.response.start":
            await self._send(self._announced(message))
            return
        body, more = message.get("body", b""), message.get("more_body", False)
        if body and self._faults.spoil_byte > 0:
            self._faults.spoil_byte -= 1
            body = bytes([body[0] ^ 1]) + body[1:]
        if not more and self._added > 0:
            body += bytes(self._added)
        if self._limit is not None:
            body = body[: self._limit - self._sent]
        for begin in range(0, len(body), _PIECE_BYTES):
            await self._piece(body[begin : begin + _PIECE_BYTES])
        if not more:
            await self._send({**message, "body": b"", "more_body": False})

    def _announced(self, message: Message) -> Message:
        if not self._added:
            return message
        headers = []
        for name, value in message["headers"]:
            if name == b"content-length":
                if self._added < 0:
                    self._limit = int(value) + self._added
                if self._faults.unannounced:
                    continue
                value = str(int(value) + self._added).encode()
            headers.append((name, value))
        return {**message, "headers": headers}

    async def _piece(self, piece: bytes) -> None:
        faults = self._faults
        if faults.cuts > 0 and faults.cut_after is not None:
            left = faults.cut_after - self._sent
            if len(piece) >= left:
                faults.cuts -= 1
                await self._pass(piece[:left])
                raise ConnectionResetError("cut on purpose")
        if faults.stall_after is not None and self._sent >= faults.stall_after:
            self._stalled.set()
            while faults.stall_after is not None:
                await asyncio.sleep(0.02)
        speeds = (faults.bytes_per_second, faults.request_bytes_per_second)
        for pace, speed in zip(self._paces, speeds, strict=True):
            if speed is not None:
                await pace.take(len(piece), speed)
        self._sent += len(piece)
        await self._pass(piece)

    async def _pass(self, piece: bytes) -> None:
        await self._send({"type": "http.response.body", "body": piece, "more_body": True})
