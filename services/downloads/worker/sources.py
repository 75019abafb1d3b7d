"""Reading a model's text and weight headers, from disk or over ranged requests from the hub."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol
from urllib.parse import quote, urljoin, urlsplit

from huggingface_hub import hf_hub_url
from huggingface_hub.utils import (  # type: ignore[attr-defined]  # Documented, not in __all__.
    build_hf_headers,
    fix_hf_endpoint_in_url,
)

from services.downloads.domain.header import (
    LENGTH_BYTES,
    Header,
    Malformed,
    header_length,
    parse_header,
    parse_object,
)
from services.downloads.worker.asking import Answer, ask
from services.downloads.worker.cache import ListedFile, Listing
from services.downloads.worker.hub_errors import hub_error, offline_error
from services.downloads.worker.listings import Repository, repository_of, tree_page_of
from services.downloads.worker.options import CacheOptions

_FIRST_READ_BYTES = 2**16
_MAX_LISTING_BYTES = 64 * 2**20
_MAX_PAGES = 500


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


class Hub:
    """The hub, read only. Every method blocks while the caller's patience lasts, or else for a
    minute at most, and raises a ShardringError."""

    def __init__(self, options: CacheOptions) -> None:
        self._options = options

    def repository(self, model_id: str, revision: str) -> Repository:
        """Resolve a revision to a commit, with the commit's files."""
        endpoint = self._options.endpoint
        if self._options.offline:
            raise offline_error(model_id, endpoint)
        # As huggingface_hub's model_info, which would read an answer of any length and pace.
        url = f"{endpoint}/api/models/{model_id}/revision/{quote(revision, safe='')}?blobs=True"
        try:
            answer = self._list(url, 0)
            repository = repository_of(parse_object(answer.body))
            if repository.is_cut:
                listing = self._tree(model_id, repository.commit)
                repository = replace(repository, listing=listing, is_cut=False)
            return repository
        except Exception as error:
            raise hub_error(error, model_id, revision, endpoint) from error

    def head(self, model_id: str, commit: str, name: str, length: int) -> bytes:
        """Return the first `length` bytes of a file, or all of a shorter one."""
        url = hf_hub_url(model_id, name, revision=commit, endpoint=self._options.endpoint)
        headers = {"Range": f"bytes=0-{length - 1}", "Accept-Encoding": "identity"}
        try:
            return ask(url, self._headers() | headers, length).body
        except Exception as error:
            raise hub_error(error, model_id, commit, self._options.endpoint) from error

    def _tree(self, model_id: str, commit: str) -> Listing:
        """Return all files of a commit, page by page as huggingface_hub's list_repo_tree."""
        endpoint = self._options.endpoint
        url = f"{endpoint}/api/models/{model_id}/tree/{commit}?recursive=True"
        listing: dict[str, ListedFile] = {}
        read_bytes = 0
        for _ in range(_MAX_PAGES):
            answer = self._list(url, read_bytes)
            read_bytes += len(answer.body)
            listing |= tree_page_of(answer.body)
            if answer.next_url is None:
                return listing
            url = fix_hf_endpoint_in_url(urljoin(url, answer.next_url), endpoint)
            if urlsplit(url)[:2] != urlsplit(endpoint)[:2]:
                # The token goes along with it.
                raise Malformed("the next page of its tree is on another host")
        raise Malformed(f"its tree has more than {_MAX_PAGES} pages")

    def _list(self, url: str, read_bytes: int) -> Answer:
        """Return a whole answer; `read_bytes` count towards the limit as well."""
        limit = _MAX_LISTING_BYTES - read_bytes
        answer = ask(url, self._headers(), limit + 1)
        if len(answer.body) > limit:
            raise Malformed(f"it has more than {_MAX_LISTING_BYTES} bytes")
        return answer

    def _headers(self) -> dict[str, str]:
        return build_hf_headers(token=self._options.token)


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
