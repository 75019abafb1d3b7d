"""Comparing a model's files on disk with the hashes that the hub names their contents by."""

import asyncio
import hashlib
import logging
import os
import re
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from services.common.errors import Reason, ShardringError
from services.downloads.domain.names import MAX_FILE_NAMES
from services.downloads.domain.records import Verification
from services.downloads.worker.cache import Cache, Listing
from services.downloads.worker.hub_threads import HubThreads
from services.downloads.worker.sources import Hub

logger = logging.getLogger(__name__)

T = TypeVar("T")

_CHUNK_BYTES = 2**20
_REPORT_SECONDS = 0.3
_SHA256 = re.compile(r"[0-9a-f]{64}")
# What git names a file's content by; the hub uses it for files that are not in large-file storage.
_GIT_SHA1 = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class _Content:
    """One content on disk, the snapshot files that are it, and the hash it must have, if known."""

    path: Path
    size: int
    files: tuple[tuple[str, Path], ...]
    etag: str | None


@dataclass
class _Found:
    """How far the reading thread is. Only that thread writes; each write is one step."""

    total_bytes: int = 0
    verified_bytes: int = 0
    corrupt: frozenset[str] = frozenset()
    unverifiable: frozenset[str] = frozenset()
    stop: threading.Event = field(default_factory=threading.Event)

    def verification(self, *, done: bool = False) -> Verification:
        return Verification(
            min(self.verified_bytes, self.total_bytes),
            self.total_bytes,
            tuple(sorted(self.corrupt)[:MAX_FILE_NAMES]),
            tuple(sorted(self.unverifiable)[:MAX_FILE_NAMES]),
            done,
        )


class Verifier:
    """Verifies models, one at a time: two would only make a disk seek to and fro."""

    def __init__(self, cache: Cache, hub: Hub, hub_threads: HubThreads, *, offline: bool) -> None:
        self._cache = cache
        self._hub = hub
        self._hub_threads = hub_threads
        self._offline = offline
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="verify")
        self._models: set[str] = set()

    async def verify(self, model_id: str, report: Callable[[Verification], None]) -> Verification:
        """Read all of a model's files, and remove those that are corrupt; return what was found.

        `report` hears how far it is a few times a second. Cancelling stops it. Raises
        MODEL_NOT_FOUND, and MODEL_IN_USE while the model is being verified already.
        """
        async with self._alone(model_id):
            found = _Found()

            def tell() -> None:
                report(found.verification())

            listings = await _reporting(asyncio.create_task(self._listings(model_id)), tell)
            reading = asyncio.get_running_loop().run_in_executor(
                self._thread, _read_all, self._cache, model_id, listings, found
            )
            try:
                await _reporting(reading, tell)
            finally:
                # One that reads sees it at the next piece of a file; one that waits is taken out.
                found.stop.set()
            return found.verification(done=True)

    def close(self) -> None:
        """Begin no further one."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    @asynccontextmanager
    async def _alone(self, model_id: str) -> AsyncIterator[None]:
        if model_id in self._models:
            raise ShardringError(
                Reason.MODEL_IN_USE,
                f"{model_id} is being verified on this node already. Wait for that to end.",
                metadata={"model_id": model_id},
            )
        self._models.add(model_id)
        try:
            yield
        finally:
            self._models.discard(model_id)

    async def _listings(self, model_id: str) -> dict[str, Listing]:
        """Return the hub's file list of each commit on disk; of none that nobody can tell."""
        commits = await asyncio.to_thread(self._cache.commits, model_id)
        if not commits:
            raise ShardringError(
                Reason.MODEL_NOT_FOUND,
                f"{model_id} is not on this node's disk.",
                metadata={"model_id": model_id},
            )
        listings: dict[str, Listing] = {}
        ask_hub = not self._offline
        for commit in sorted(commits):
            listing = await asyncio.to_thread(self._cache.listing, model_id, commit)
            if listing is None and ask_hub:
                try:
                    repository = await self._hub_threads.run(self._hub.repository, model_id, commit)
                except ShardringError as error:
                    # What cannot be verified for it, is told.
                    ask_hub = error.reason is not Reason.HUB_UNREACHABLE
                else:
                    listing = repository.listing if repository.commit == commit else None
            listings[commit] = listing or {}
        return listings


async def _reporting(future: "asyncio.Future[T]", tell: Callable[[], None]) -> T:
    """Return a future's result, and tell a few times a second that it is not there yet."""
    try:
        while not future.done():
            tell()
            await asyncio.wait([future], timeout=_REPORT_SECONDS)
    finally:
        future.cancel()
    return future.result()


def _read_all(cache: Cache, model_id: str, listings: dict[str, Listing], found: _Found) -> None:
    contents = list(_contents(cache, model_id, listings))
    found.total_bytes = sum(content.size for content in contents)
    for content in contents:
        if found.stop.is_set():
            return
        names = frozenset(name for name, _ in content.files)
        before = found.verified_bytes
        try:
            if content.etag is None:
                found.unverifiable |= names
            elif _is_corrupt(content.path, content.etag, found):
                found.corrupt |= names
                _remove(cache.storage(model_id) / "blobs", content)
        except FileNotFoundError:
            pass  # Somebody removed it meanwhile.
        except OSError as error:
            logger.warning("Cannot verify %s: %s", content.path, error)
            found.unverifiable |= names
        if not found.stop.is_set():
            found.verified_bytes = before + content.size


def _contents(cache: Cache, model_id: str, listings: dict[str, Listing]) -> Iterator[_Content]:
    """Yield each content once, however many commits have it, with every file that is it."""
    blobs = cache.storage(model_id) / "blobs"
    files: dict[tuple[Path, str | None], list[tuple[str, Path]]] = {}
    sizes: dict[Path, int] = {}
    for commit, listing in listings.items():
        root = cache.snapshot(model_id, commit)
        for name, size in cache.sizes(model_id, commit).items():
            path = (root / name).resolve()
            etag = listing[name].etag if name in listing else None
            if etag is None and path.parent == blobs.resolve():
                # Whoever fetched it named it by what the hub said.
                etag = path.name
            if etag is not None and not (_SHA256.fullmatch(etag) or _GIT_SHA1.fullmatch(etag)):
                etag = None
            files.setdefault((path, etag), []).append((name, root / name))
            sizes[path] = size
    for (path, etag), held in sorted(files.items(), key=lambda entry: entry[1][0]):
        yield _Content(path, sizes[path], tuple(held), etag)


def _is_corrupt(path: Path, etag: str, found: _Found) -> bool:
    """Read a file in pieces. False also when it was changed meanwhile, or on a stop."""
    piece = memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        before = os.fstat(file.fileno())
        if _SHA256.fullmatch(etag):
            digest = hashlib.sha256()
        else:
            digest = hashlib.sha1(usedforsecurity=False)
            digest.update(b"blob %d\0" % before.st_size)
        while count := file.readinto(piece):
            digest.update(piece[:count])
            found.verified_bytes += count
            if found.stop.is_set():
                return False
    after = path.stat()
    same = (before.st_ino, before.st_size, before.st_mtime_ns) == (
        after.st_ino,
        after.st_size,
        after.st_mtime_ns,
    )
    return same and digest.hexdigest() != etag


def _remove(blobs: Path, content: _Content) -> None:
    """Remove every file that is this content, and the content when it is the model's own blob."""
    for _, path in content.files:
        path.unlink(missing_ok=True)
    if content.path.parent == blobs.resolve():
        content.path.unlink(missing_ok=True)
