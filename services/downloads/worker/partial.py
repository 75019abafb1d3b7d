"""A file's content while it comes: blobs/ETAG.incomplete, hashed as it is written."""

import hashlib
import os
import re
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from services.downloads.worker.budget import Budget

_SHA256 = re.compile(r"[0-9a-f]{64}")
_GIT_SHA1 = re.compile(r"[0-9a-f]{40}")
_READ_BYTES = 2**20


class TooLong(Exception):
    """More came than was announced."""


class _Hash(Protocol):
    def update(self, data: bytes | memoryview, /) -> None: ...
    def hexdigest(self) -> str: ...


def names_content(etag: str) -> bool:
    """True for an ETag that is a hash of the content, as the hub's are."""
    return bool(_SHA256.fullmatch(etag) or _GIT_SHA1.fullmatch(etag))


def content_hash(etag: str, size_bytes: int) -> _Hash | None:
    """Return a hash whose digest of the right content is the ETag; None for one that is no hash.

    Large files are named by their SHA-256, others as git names a blob.
    """
    if _SHA256.fullmatch(etag):
        return hashlib.sha256()
    if _GIT_SHA1.fullmatch(etag):
        return hashlib.sha1(b"blob %d\0" % size_bytes, usedforsecurity=False)
    return None


class Partial:
    """Goes on where an earlier try broke off, and refuses to grow beyond the file's size: a body
    without an end would fill the disk."""

    def __init__(self, path: Path, etag: str, size_bytes: int, budget: Budget) -> None:
        self._path = path
        self._etag = etag
        self._size = size_bytes
        self._budget = budget
        self._file = path.open("ab", buffering=0)
        self.length = self._file.tell()
        # Bytes that an earlier try left here.
        self.resumed = 0
        if self.length > size_bytes:
            self.restart()
        else:
            self.resumed = self.length
            self._hash = content_hash(etag, size_bytes)
            self._hash_what_is_there()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def write(self, data: bytes) -> None:
        """Append bytes as fast as the budget allows. Raises TooLong, and OSError of the disk."""
        if self.length + len(data) > self._size:
            raise TooLong
        self._budget.take(len(data))
        left = memoryview(data)
        while left:
            written = self._file.write(left)
            # What is on disk counts, also when the disk is full after it.
            self.length += written
            if self._hash is not None:
                self._hash.update(left[:written])
            left = left[written:]

    def restart(self) -> None:
        """Throw away what is there."""
        os.truncate(self._file.fileno(), 0)
        self.length = self.resumed = 0
        self._hash = content_hash(self._etag, self._size)

    def right(self) -> bool:
        """True when the content is what the ETag names, as far as the ETag says."""
        return self._hash is None or self._hash.hexdigest() == self._etag

    def _hash_what_is_there(self) -> None:
        if self._hash is None or not self.length:
            return
        with self._path.open("rb") as file:
            while chunk := file.read(_READ_BYTES):
                self._hash.update(chunk)
