"""What the hub says about a model: its commit, its files, and who may have it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.downloads.domain.card import license_name
from services.downloads.domain.header import Malformed
from services.downloads.domain.names import is_commit, is_safe_file
from services.downloads.worker.cache import ListedFile, Listing

# A model of as many files as one may have still has a size that a message holds.
_MAX_FILE_BYTES = 2**50
# The answer about a model may list no more than a part of so many.
LONG_LISTING = 1000


@dataclass(frozen=True)
class Repository:
    """A model as the hub lists it at one commit.

    `is_cut`: it may have files that are not in `listing`.
    """

    commit: str
    listing: Listing
    license: str
    gated: bool = False
    is_cut: bool = False


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
            name: _listed_file(name, entry, oid="blobId", lfs_oid="sha256")
            for name, entry in listed.items()
            if isinstance(name, str) and is_safe_file(name)
        },
        license_name(card.get("license")) if isinstance(card, dict) else "",
        # False, or how access is granted: "auto" or "manual".
        gated=bool(info.get("gated")),
        is_cut=len(siblings) >= LONG_LISTING,
    )


def tree_page_of(text: bytes) -> Listing:
    """Return the files on one page of a commit's tree. Raises Malformed."""
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Malformed("its tree is not JSON") from error
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise Malformed("its tree lists no files")
    return {
        entry["path"]: _listed_file(entry["path"], entry, oid="oid", lfs_oid="oid")
        for entry in entries
        if entry.get("type") == "file"
        and isinstance(entry.get("path"), str)
        and is_safe_file(entry["path"])
    }


def _listed_file(name: str, entry: Mapping[str, Any], *, oid: str, lfs_oid: str) -> ListedFile:
    lfs = entry.get("lfs")
    size, etag = entry.get("size"), entry.get(oid)
    if isinstance(lfs, dict):
        size, etag = lfs.get("size"), lfs.get(lfs_oid)
    if type(size) is not int or not 0 <= size <= _MAX_FILE_BYTES or not isinstance(etag, str):
        raise Malformed(f"it lists {name[:80]!r} without a size and a hash")
    return ListedFile(size, etag)
