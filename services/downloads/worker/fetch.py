"""The fetching child process: one download's files, through huggingface_hub.

A process of its own, because huggingface_hub blocks: killing it is the one sound way to stop
within a second, and what it wrote stays. It reads one JSON line, the job, on standard input, and
writes one JSON line, {} or an error, on standard output. It ends when its input does, so it
never outlives the worker.

huggingface_hub itself starts a broken-off file anew; here each body goes to blobs/ETAG.incomplete
under huggingface_hub's own lock, and its `http_get` goes on from there. Files in Xet storage are
left to huggingface_hub altogether.
"""

import hashlib
import importlib.util
import io
import json
import logging
import os
import re
import sys
import threading
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
from huggingface_hub import constants, get_hf_file_metadata, hf_hub_download, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.file_download import HfFileMetadata, http_get
from huggingface_hub.utils import (  # type: ignore[attr-defined]  # Documented, not in __all__.
    WeakFileLock,
    build_hf_headers,
)

from services.common.errors import Reason, ShardringError
from services.downloads.worker.hub_errors import hub_error

# Bytes are written in pieces of this size; what is lost when the process is killed.
_CHUNK_BYTES = 2**20
# Tries without a byte gained, beside huggingface_hub's own retries.
_TRIES = 2
_ETAG = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class FetchJob:
    """What to fetch: file names with their sizes in bytes, all of one commit."""

    model_id: str
    commit: str
    endpoint: str
    token: str | None
    cache_dir: str
    storage: str
    parallel_files: int
    files: dict[str, int]

    def to_json(self) -> str:
        """Return the job as one line."""
        return json.dumps(asdict(self))


def main() -> None:
    """Run the job on standard input; say how it went on standard output."""
    logging.basicConfig(level=logging.ERROR)
    job = FetchJob(**json.loads(sys.stdin.readline()))
    threading.Thread(target=_end_with_input, daemon=True).start()
    # Only this process is affected; the default of 10 MiB makes progress and resuming coarse.
    constants.DOWNLOAD_CHUNK_SIZE = _CHUNK_BYTES
    error = run(job)
    answer = {}
    if error is not None:
        answer = {"reason": error.reason, "message": error.message, "metadata": error.metadata}
    print(json.dumps(answer), flush=True)
    # Other files may still be on their way: after the first fault they are of no use.
    os._exit(0)


def run(job: FetchJob) -> ShardringError | None:
    """Fetch all files, a few at a time; return the first error."""
    pool = ThreadPoolExecutor(job.parallel_files)
    running = [pool.submit(_fetch_with_retries, job, name) for name in job.files]
    done, _ = wait(running, return_when=FIRST_EXCEPTION)
    errors = [error for future in done if (error := future.exception()) is not None]
    pool.shutdown(wait=False, cancel_futures=True)
    if not errors:
        return None
    error = errors[0]
    if not isinstance(error, Exception):
        raise error
    return hub_error(error, job.model_id, job.commit, job.endpoint)


def _fetch_with_retries(job: FetchJob, name: str) -> None:
    tries, gained = 0, 0
    while True:
        try:
            _fetch(job, name)
            return
        except (HfHubHTTPError, httpx2.HTTPError, OSError) as error:
            partial = _partial_bytes(job)
            tries = 1 if partial > gained else tries + 1
            gained = partial
            if tries >= _TRIES or not _is_transient(error):
                raise


def _is_transient(error: Exception) -> bool:
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code >= 500 or error.response.status_code == 429
    # huggingface_hub reports a body of the wrong length as an OSError without a number.
    return isinstance(error, httpx2.TransportError) or (
        isinstance(error, OSError) and error.errno is None
    )


def _partial_bytes(job: FetchJob) -> int:
    sizes = []
    for path in (Path(job.storage) / "blobs").glob("*"):
        try:
            sizes.append(path.stat().st_size)
        except FileNotFoundError:
            continue  # Renamed meanwhile, so whole.
    return sum(sizes)


def _fetch(job: FetchJob, name: str) -> None:
    """Bring one file into the snapshot with its full size."""
    size = job.files[name]
    pointer = Path(job.storage) / "snapshots" / job.commit / name
    if pointer.exists() or pointer.is_symlink():
        if pointer.exists() and pointer.stat().st_size == size:
            return
        # Cut short by whoever wrote it: nothing says which bytes of it are right.
        pointer.unlink()
    url = hf_hub_url(job.model_id, name, revision=job.commit, endpoint=job.endpoint)
    metadata = get_hf_file_metadata(
        url, token=job.token, endpoint=job.endpoint, retry_on_errors=True
    )
    if not metadata.etag or not _ETAG.fullmatch(metadata.etag):
        raise _faulty(job, f"names the content of {name} {metadata.etag!r}")
    if metadata.commit_hash != job.commit or metadata.size not in (None, size):
        raise _faulty(job, f"offers {name} of another commit or size than it listed")
    _fetch_blob(job, name, metadata)
    # Links the blob into the snapshot; fetches it when it is in Xet storage.
    hf_hub_download(
        job.model_id,
        name,
        revision=job.commit,
        cache_dir=job.cache_dir,
        endpoint=job.endpoint,
        token=job.token,
    )


def _fetch_blob(job: FetchJob, name: str, metadata: HfFileMetadata) -> None:
    """Bring a body into blobs/ETAG, going on from what is there; drop what cannot be used."""
    size = job.files[name]
    storage = Path(job.storage)
    blob = storage / "blobs" / str(metadata.etag)
    lock = Path(job.cache_dir) / ".locks" / storage.name / f"{metadata.etag}.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    blob.parent.mkdir(parents=True, exist_ok=True)
    partial = blob.with_name(f"{blob.name}.incomplete")
    with WeakFileLock(lock):
        if blob.exists():
            if blob.stat().st_size == size:
                return
            blob.unlink()
        # Left by a killed process; huggingface_hub never looks at these again.
        for stale in blob.parent.glob(f"{blob.name}.*.incomplete"):
            stale.unlink(missing_ok=True)
        if _in_xet(metadata):
            return
        resumed = partial.stat().st_size if partial.exists() else 0
        if resumed > size:
            partial.unlink()
            resumed = 0
        _get_body(job, name, metadata, partial)
        if resumed and not _has_hash(partial, str(metadata.etag)):
            partial.unlink()
            _get_body(job, name, metadata, partial)
        if partial.stat().st_size != size:
            partial.unlink()
            raise _wrong_size(job, name)
        os.replace(partial, blob)


def _get_body(job: FetchJob, name: str, metadata: HfFileMetadata, partial: Path) -> None:
    headers = build_hf_headers(token=job.token)
    if urlsplit(metadata.location).netloc != urlsplit(job.endpoint).netloc:
        # The storage behind the hub has signed addresses; the token is not for it.
        headers.pop("authorization", None)
    with _CappedFile(partial, job.files[name]) as file:
        try:
            http_get(
                metadata.location,
                file,
                resume_size=file.tell(),
                headers=headers,
                expected_size=job.files[name],
                displayed_filename=name,
            )
        except _TooLong as error:
            partial.unlink()
            raise _wrong_size(job, name) from error


class _TooLong(Exception):
    """More came than was announced."""


class _CappedFile(io.BufferedWriter):
    """A file to append to that refuses to grow beyond its size: a body without an end would fill
    the disk."""

    def __init__(self, path: Path, size: int) -> None:
        super().__init__(io.FileIO(path, "ab"))
        self._size = size

    def write(self, data: Any) -> int:
        """Append bytes, or raise _TooLong."""
        if self.tell() + len(data) > self._size:
            raise _TooLong
        return super().write(data)


def _has_hash(path: Path, etag: str) -> bool:
    """False when the ETag is a SHA-256 and the content has another one."""
    if not _SHA256.fullmatch(etag):
        return True
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == etag


def _in_xet(metadata: HfFileMetadata) -> bool:
    return (
        metadata.xet_file_data is not None
        and not constants.HF_HUB_DISABLE_XET
        and importlib.util.find_spec("hf_xet") is not None
    )


def _wrong_size(job: FetchJob, name: str) -> ShardringError:
    return _faulty(job, f"sent {name} with another size than it announced")


def _faulty(job: FetchJob, what: str) -> ShardringError:
    return ShardringError(
        Reason.DOWNLOAD_FAILED,
        f"{job.endpoint} {what}. Start the download again; if it stays so, the hub is at fault.",
        metadata={"model_id": job.model_id},
    )


def _end_with_input() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    main()
