"""Where a file's content comes from: the hub or a neighbour, by HTTP."""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx2
from huggingface_hub import constants, get_hf_file_metadata, get_session, hf_hub_url
from huggingface_hub.utils import (  # type: ignore[attr-defined]  # Documented, not in __all__.
    build_hf_headers,
    hf_raise_for_status,
)

from services.common.errors import Reason, ShardringError
from services.common.tls import node_host
from services.downloads.worker.protocol import Fault, FetchJob, FileOrder

_AGAIN = "Start the download again; if it stays so, the hub is at fault."
_ETAG = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*")
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")
# A neighbour is near: one that takes longer to connect, or for the next byte, is not well.
_NEIGHBOUR_TIMEOUT = httpx2.Timeout(5.0, connect=3.0)
# A neighbour that sends less over this time is as good as silent.
_LEAST_BYTES_PER_SECOND = 100_000
_MEASURED_SECONDS = 5.0


class SourceFault(Exception):
    """A source is at fault; says how, with the error to show when nothing else helps."""

    def __init__(self, fault: Fault, error: ShardringError) -> None:
        super().__init__(error.message)
        self.fault = fault
        self.error = error


class RangeRefused(Exception):
    """The source will not begin where it was asked to (416)."""


@dataclass(frozen=True)
class Body:
    """Content from byte `start` on."""

    start: int
    chunks: Iterator[bytes]


@dataclass(frozen=True)
class Offer:
    """What a source says of a file, and where its content is."""

    etag: str
    url: str
    headers: dict[str, str]
    xet: bool = False


class Origin:
    """One file at one source."""

    def __init__(self, job: FetchJob, order: FileOrder, neighbours: httpx2.Client) -> None:
        self._job = job
        self._order = order
        self._neighbours = neighbours
        self._who = f"Node {order.node_id}" if order.node_id else job.endpoint

    def offer(self) -> Offer:
        """Return what the source offers. Raises SourceFault, and huggingface_hub's errors."""
        if self._order.node_id:
            # Asked for at once; what it names is looked at before its content is.
            url = hf_hub_url(
                self._job.model_id,
                self._order.name,
                revision=self._job.commit,
                endpoint=self._order.endpoint,
            )
            # Whatever it is, a token is not for a neighbour.
            return Offer(self._order.etag, url, build_hf_headers(token=False))
        return self._hub_offer()

    def _hub_offer(self) -> Offer:
        job, order = self._job, self._order
        url = hf_hub_url(job.model_id, order.name, revision=job.commit, endpoint=job.endpoint)
        metadata = get_hf_file_metadata(url, token=job.token, endpoint=job.endpoint)
        if not metadata.etag or not _ETAG.fullmatch(metadata.etag):
            raise self.lied(f"names the content of {order.name} {metadata.etag!r}")
        if metadata.commit_hash != job.commit or metadata.size not in (None, order.size_bytes):
            raise self.lied(f"offers {order.name} of another commit or size than it listed")
        headers = build_hf_headers(token=job.token)
        if httpx2.URL(metadata.location).origin != httpx2.URL(job.endpoint).origin:
            # The storage behind the hub has signed addresses; the token is not for it.
            headers.pop("authorization", None)
        return Offer(metadata.etag, metadata.location, headers, metadata.xet_file_data is not None)

    @contextmanager
    def body(self, offer: Offer, start: int) -> Iterator[Body]:
        """Ask for the content from byte `start` on; it may begin at 0 all the same.

        Raises SourceFault, RangeRefused and HTTP's errors; reading the chunks does, too.
        """
        headers = {**offer.headers, "Accept-Encoding": "identity"}
        if start:
            headers["Range"] = f"bytes={start}-"
        near = bool(self._order.node_id)
        client = self._neighbours if near else get_session()
        timeout = _NEIGHBOUR_TIMEOUT if near else constants.HF_HUB_DOWNLOAD_TIMEOUT
        # A neighbour's certificate names the node, wherever it is.
        meant = {"sni_hostname": node_host(self._order.node_id)} if near and self._job.tls else None
        with client.stream(
            "GET", offer.url, headers=headers, timeout=timeout, extensions=meant
        ) as answer:
            if start and answer.status_code == 416:
                raise RangeRefused
            hf_raise_for_status(answer)
            if near:
                self._check_neighbour(answer)
            first = self._first_byte(answer, start)
            chunks = answer.iter_bytes()
            yield Body(first, self._not_too_slow(chunks) if near else chunks)

    def _first_byte(self, answer: httpx2.Response, start: int) -> int:
        """Return where the content begins; refuse an answer of another size than listed."""
        size = self._order.size_bytes
        if answer.status_code == 206:
            match = _CONTENT_RANGE.fullmatch(answer.headers.get("content-range", ""))
            if match is None or match[3] not in ("*", str(size)) or int(match[1]) not in (0, start):
                raise self.wrong_size()
            return int(match[1])
        length = answer.headers.get("content-length")
        if answer.status_code != 200:
            raise self.lied(f"answers HTTP {answer.status_code} where {self._order.name} should be")
        if length not in (None, str(size)) and "content-encoding" not in answer.headers:
            raise self.wrong_size()
        return 0

    def _check_neighbour(self, answer: httpx2.Response) -> None:
        """A neighbour has to name the content and the size that the hub listed."""
        etag = answer.headers.get("x-linked-etag") or answer.headers.get("etag") or ""
        if etag.removeprefix("W/").strip('"') != self._order.etag:
            raise self.lied(f"offers other content as {self._order.name} than the hub lists")
        if "content-encoding" in answer.headers or not (
            "content-length" in answer.headers or "content-range" in answer.headers
        ):
            raise self.lied(f"names no size of {self._order.name}")

    def _not_too_slow(self, chunks: Iterator[bytes]) -> Iterator[bytes]:
        """Pass content on; only time spent waiting for it counts, not what is done with it."""
        waited, received = 0.0, 0
        while True:
            before = time.monotonic()
            chunk = next(chunks, None)
            waited += time.monotonic() - before
            if chunk is None:
                return
            received += len(chunk)
            yield chunk
            if waited >= _MEASURED_SECONDS:
                if received < waited * _LEAST_BYTES_PER_SECOND:
                    raise self.stalled("is too slow")
                waited, received = 0.0, 0

    def stalled(self, what: str) -> SourceFault:
        """Return the fault of a source that may do better later."""
        return SourceFault(Fault.STALLED, self._error(what))

    def lied(self, what: str) -> SourceFault:
        """Return the fault of a source that named or sent what cannot be true."""
        return SourceFault(Fault.LIED, self._error(what))

    def wrong_size(self) -> SourceFault:
        """Return the fault of a source that sent more or less than was listed."""
        return self.lied(f"sent {self._order.name} with another size than it announced")

    def _error(self, what: str) -> ShardringError:
        return ShardringError(
            Reason.DOWNLOAD_FAILED,
            f"{self._who} {what}." if self._order.node_id else f"{self._who} {what}. {_AGAIN}",
            metadata={"model_id": self._job.model_id},
        )
