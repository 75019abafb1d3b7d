"""Reading a model's text and weight headers, from disk or over ranged requests from the hub."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from huggingface_hub import HfApi, get_session, hf_hub_url
from huggingface_hub.utils import (  # type: ignore[attr-defined]  # Documented, not in __all__.
    build_hf_headers,
    hf_raise_for_status,
)

from services.downloads.domain.header import (
    LENGTH_BYTES,
    Header,
    Malformed,
    header_length,
    parse_header,
)
from services.downloads.domain.names import is_commit, is_safe_file
from services.downloads.worker.cache import ListedFile, Listing
from services.downloads.worker.hub_errors import hub_error, offline_error
from services.downloads.worker.options import CacheOptions

_TIMEOUT_SECONDS = 10.0
_FIRST_READ_BYTES = 2**16


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
    """The hub, read only. Every method blocks, and raises a ShardringError."""

    def __init__(self, options: CacheOptions) -> None:
        self._options = options
        self._api = HfApi(endpoint=options.endpoint, token=options.token)

    def repository(self, model_id: str, revision: str) -> Repository:
        """Resolve a revision to a commit, with the commit's files."""
        if self._options.offline:
            raise offline_error(model_id, self._options.endpoint)
        try:
            info = self._api.model_info(
                model_id, revision=revision, files_metadata=True, timeout=_TIMEOUT_SECONDS
            )
            if info.sha is None or not is_commit(info.sha):
                raise ValueError(f"the hub named no commit for {revision!r}")
            card = info.card_data
            return Repository(
                info.sha,
                {
                    file.rfilename: ListedFile(
                        file.lfs.size if file.lfs else file.size or 0,
                        file.lfs.sha256 if file.lfs else file.blob_id or "",
                    )
                    for file in info.siblings or ()
                    if is_safe_file(file.rfilename)
                },
                str(card.get("license") or "") if card else "",
            )
        except Exception as error:
            raise hub_error(error, model_id, revision, self._options.endpoint) from error

    def head(self, model_id: str, commit: str, name: str, length: int) -> bytes:
        """Return the first `length` bytes of a file, or all of a shorter one."""
        url = hf_hub_url(model_id, name, revision=commit, endpoint=self._options.endpoint)
        headers = build_hf_headers(token=self._options.token) | {
            "Range": f"bytes=0-{length - 1}",
            "Accept-Encoding": "identity",
        }
        try:
            with get_session().stream(
                "GET", url, headers=headers, timeout=_TIMEOUT_SECONDS
            ) as response:
                hf_raise_for_status(response)
                read = bytearray()
                # A hub that ignores the range sends the whole file: stop at what was asked.
                for chunk in response.iter_bytes(chunk_size=_FIRST_READ_BYTES):
                    read += chunk
                    if len(read) >= length:
                        break
                return bytes(read[:length])
        except Exception as error:
            raise hub_error(error, model_id, commit, self._options.endpoint) from error


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
