"""Reading a model's text and weight headers, from disk or over ranged requests from the hub."""

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

from huggingface_hub import get_session, hf_hub_url
from huggingface_hub.utils import (  # type: ignore[attr-defined]  # Documented, not in __all__.
    build_hf_headers,
    hf_raise_for_status,
)

from services.downloads.domain.card import license_name
from services.downloads.domain.header import (
    LENGTH_BYTES,
    Header,
    Malformed,
    header_length,
    parse_header,
    parse_object,
)
from services.downloads.domain.names import is_commit, is_safe_file
from services.downloads.worker.cache import ListedFile, Listing
from services.downloads.worker.hub_errors import hub_error, offline_error
from services.downloads.worker.options import CacheOptions

# For one read, and for one answer in all.
_TIMEOUT_SECONDS = 10.0
_READ_SECONDS = 50.0
_FIRST_READ_BYTES = 2**16
_MAX_LISTING_BYTES = 64 * 2**20
# A model of as many files as one may have still has a size that a message holds.
_MAX_FILE_BYTES = 2**50


class Source(Protocol):
    """A model's files at one commit."""

    @property
    def sizes(self) -> Mapping[str, int]:
        """Bytes of each file."""

    def head(self, name: str, length: int) -> bytes:
        """Return the first `length` bytes of a file, or all of a shorter one."""


@dataclass(frozen=True)
class DiskSource:
    """The files of a snapshot folder."""

    root: Path
    sizes: Mapping[str, int]

    def head(self, name: str, length: int) -> bytes:
        """See Source."""
        with (self.root / name).open("rb") as file:
            return file.read(length)


@dataclass(frozen=True)
class Repository:
    """A model as the hub lists it at one commit."""

    commit: str
    listing: Listing
    license: str


class Hub:
    """The hub, read only. Every method blocks for a minute at most, and raises a ShardringError."""

    def __init__(self, options: CacheOptions) -> None:
        self._options = options
        self._closed = threading.Event()

    def close(self) -> None:
        """Hear no answer out any more: the process stops."""
        self._closed.set()

    def repository(self, model_id: str, revision: str) -> Repository:
        """Resolve a revision to a commit, with the commit's files."""
        endpoint = self._options.endpoint
        if self._options.offline:
            raise offline_error(model_id, endpoint)
        # As huggingface_hub's model_info, which would read an answer of any length and pace.
        url = f"{endpoint}/api/models/{model_id}/revision/{quote(revision, safe='')}?blobs=True"
        try:
            text = self._read(url, {}, _MAX_LISTING_BYTES + 1)
            if len(text) > _MAX_LISTING_BYTES:
                raise Malformed(f"it has more than {_MAX_LISTING_BYTES} bytes")
            return repository_of(parse_object(text))
        except Exception as error:
            raise hub_error(error, model_id, revision, endpoint) from error

    def head(self, model_id: str, commit: str, name: str, length: int) -> bytes:
        """Return the first `length` bytes of a file, or all of a shorter one."""
        url = hf_hub_url(model_id, name, revision=commit, endpoint=self._options.endpoint)
        headers = {"Range": f"bytes=0-{length - 1}", "Accept-Encoding": "identity"}
        try:
            return self._read(url, headers, length)
        except Exception as error:
            raise hub_error(error, model_id, commit, self._options.endpoint) from error

    def _read(self, url: str, headers: dict[str, str], length: int) -> bytes:
        """Return the first `length` bytes of an answer; a hub that sends more is not heard out."""
        headers = build_hf_headers(token=self._options.token) | headers
        until = time.monotonic() + _READ_SECONDS
        with get_session().stream("GET", url, headers=headers, timeout=_TIMEOUT_SECONDS) as answer:
            hf_raise_for_status(answer)
            read = bytearray()
            for chunk in answer.iter_bytes():
                read += chunk
                if len(read) >= length:
                    break
                # One that sends a byte now and then never runs into the timeout of a read.
                if time.monotonic() > until or self._closed.is_set():
                    raise TimeoutError(f"no whole answer within {_READ_SECONDS:.0f} s")
            return bytes(read[:length])


def repository_of(info: Mapping[str, Any]) -> Repository:
    """Return what the hub's answer about a model says. Raises Malformed."""
    commit, siblings, card = info.get("sha"), info.get("siblings"), info.get("cardData")
    if not isinstance(commit, str) or not is_commit(commit):
        raise Malformed("it names no commit")
    if not isinstance(siblings, list) or not all(isinstance(entry, dict) for entry in siblings):
        raise Malformed("it lists no files")
    listed = {entry.get("rfilename"): entry for entry in siblings}
    return Repository(
        commit,
        {
            name: _listed_file(name, entry)
            for name, entry in listed.items()
            if isinstance(name, str) and is_safe_file(name)
        },
        license_name(card.get("license")) if isinstance(card, dict) else "",
    )


def _listed_file(name: str, entry: Mapping[str, Any]) -> ListedFile:
    lfs = entry.get("lfs")
    size, etag = entry.get("size"), entry.get("blobId")
    if isinstance(lfs, dict):
        size, etag = lfs.get("size"), lfs.get("sha256")
    if type(size) is not int or not 0 <= size <= _MAX_FILE_BYTES or not isinstance(etag, str):
        raise Malformed(f"it lists {name[:80]!r} without a size and a hash")
    return ListedFile(size, etag)


@dataclass(frozen=True)
class HubSource:
    """The files of a commit on the hub."""

    hub: Hub
    model_id: str
    commit: str
    sizes: Mapping[str, int]

    def head(self, name: str, length: int) -> bytes:
        """See Source."""
        return self.hub.head(self.model_id, self.commit, name, length)


def read_text(source: Source, name: str, limit: int) -> bytes:
    """Return a whole file of at most `limit` bytes. Raises Malformed for a larger one."""
    if (size := source.sizes[name]) > limit:
        raise Malformed(f"it has {size} bytes, more than {limit}")
    return source.head(name, size) if size else b""


def read_header(source: Source, name: str) -> Header:
    """Return a weight file's header. Raises Malformed, also when the file is cut short."""
    size = source.sizes[name]
    head = source.head(name, min(size, _FIRST_READ_BYTES)) if size else b""
    end = LENGTH_BYTES + header_length(head)
    if end > size:
        raise Malformed(f"it has {size} bytes, fewer than its header")
    if end > len(head):
        head = source.head(name, end)
    header = parse_header(head[LENGTH_BYTES:end])
    if header.file_bytes != size:
        raise Malformed(f"it has {size} bytes where its header wants {header.file_bytes}")
    return header
