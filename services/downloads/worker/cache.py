"""The cache folder on disk, in huggingface_hub's standard layout.

    models--ORG--NAME/refs/main                what a branch or tag resolved to
    models--ORG--NAME/snapshots/COMMIT/FILE    links to blobs
    models--ORG--NAME/blobs/ETAG               contents; ETAG.incomplete while being fetched
    models--ORG--NAME/trees/COMMIT.json        the hub's file list, in huggingface_hub's format
    models--ORG--NAME/shardring/COMMIT.json    the model's facts (shardring.downloads.v1.Model)

Layout: https://huggingface.co/docs/huggingface_hub/guides/manage-cache. All methods block.
"""

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from services.common.errors import ShardringError
from services.downloads.domain.names import check_model_id, is_commit, is_safe_file

logger = logging.getLogger(__name__)

_PREFIX = "models--"
_TREE_FORMAT = 1
INCOMPLETE = ".incomplete"


@dataclass(frozen=True)
class ListedFile:
    """A file as the hub lists it: its size, and the ETag that names its content."""

    size_bytes: int
    etag: str


Listing = Mapping[str, ListedFile]


class Cache:
    """One cache folder. It need not exist yet."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def storage(self, model_id: str) -> Path:
        """Return the folder that holds everything of a model."""
        return self.folder / (_PREFIX + model_id.replace("/", "--"))

    def snapshot(self, model_id: str, commit: str) -> Path:
        """Return the folder that holds the model's files at a commit."""
        return self.storage(model_id) / "snapshots" / commit

    def model_ids(self) -> list[str]:
        """Return the models that the folder has anything of."""
        ids = []
        for path in sorted(self.folder.glob(f"{_PREFIX}*")):
            model_id = path.name.removeprefix(_PREFIX).replace("--", "/")
            try:
                ids.append(check_model_id(model_id))
            except ShardringError:
                logger.debug("%s is not a model's folder", path)
        return ids

    def refs(self, model_id: str) -> dict[str, str]:
        """Return the commit of each branch and tag that was resolved before."""
        folder = self.storage(model_id) / "refs"
        refs = {}
        for path in folder.rglob("*"):
            try:
                commit = path.read_text().strip() if path.is_file() else ""
            except (OSError, UnicodeDecodeError):
                continue
            if is_commit(commit):
                refs[path.relative_to(folder).as_posix()] = commit
        return refs

    def commits(self, model_id: str) -> set[str]:
        """Return the commits that anything is on disk of."""
        snapshots = self.storage(model_id) / "snapshots"
        found = {path.name for path in snapshots.glob("*") if is_commit(path.name)}
        return found | set(self.refs(model_id).values())

    def resolve(self, model_id: str, revision: str) -> str | None:
        """Return the commit a revision means as far as the cache knows."""
        if is_commit(revision):
            return revision if revision in self.commits(model_id) else None
        return self.refs(model_id).get(revision)

    def sizes(self, model_id: str, commit: str) -> dict[str, int]:
        """Return the size of each file of a snapshot, following links; broken ones are left out."""
        root = self.snapshot(model_id, commit)
        sizes = {}
        for folder, _, names in os.walk(root):
            for name in names:
                path = Path(folder, name)
                relative = path.relative_to(root).as_posix()
                try:
                    if is_safe_file(relative):
                        sizes[relative] = path.stat().st_size
                except OSError:
                    continue
        return sizes

    def partial_sizes(self, model_id: str) -> dict[str, int]:
        """Return the bytes of each blob, whole or partial, by ETag, that the next fetch goes on
        from."""
        return self._blob_sizes(model_id, lambda etag, rest: not rest)

    def written_sizes(self, model_id: str, etags: Set[str]) -> dict[str, int]:
        """Return the bytes on disk of blobs that are being fetched; those count, too, that
        huggingface_hub writes under names of their own."""
        return self._blob_sizes(model_id, lambda etag, rest: etag in etags)

    def _blob_sizes(self, model_id: str, counts: Callable[[str, str], bool]) -> dict[str, int]:
        sizes: dict[str, int] = {}
        try:
            entries = list(os.scandir(self.storage(model_id) / "blobs"))
        except OSError:
            return sizes
        for entry in entries:
            etag, _, rest = entry.name.removesuffix(INCOMPLETE).partition(".")
            if counts(etag, rest):
                with suppress(OSError):  # Renamed or removed just now.
                    sizes[etag] = max(sizes.get(etag, 0), entry.stat().st_size)
        return sizes

    def listing_path(self, model_id: str, commit: str) -> Path:
        """Return where the hub's file list of a commit is kept."""
        return self.storage(model_id) / "trees" / f"{commit}.json"

    def listing(self, model_id: str, commit: str) -> Listing | None:
        """Return the hub's file list of a commit, when it was kept."""
        try:
            tree = json.loads(self.listing_path(model_id, commit).read_bytes())
            if tree["format_version"] != _TREE_FORMAT:
                return None
            return {
                name: ListedFile(
                    int(entry.get("lfs_size") or entry["size"]),
                    str(entry.get("lfs_sha256") or entry["blob_id"]),
                )
                for name, entry in tree["files"].items()
                if is_safe_file(name)
            }
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            logger.warning("The kept file list of %s is unreadable: %r", model_id, error)
            return None

    def keep_listing(self, model_id: str, commit: str, listing: Listing) -> None:
        """Keep the hub's file list for the time when the hub cannot be reached."""
        files: dict[str, dict[str, object]] = {}
        for name, file in sorted(listing.items()):
            files[name] = {"size": file.size_bytes, "blob_id": file.etag}
            if len(file.etag) == 64:
                files[name] |= {"lfs_sha256": file.etag, "lfs_size": file.size_bytes}
        text = json.dumps({"format_version": _TREE_FORMAT, "files": files}, indent=1)
        path = self.listing_path(model_id, commit)
        if not path.exists():
            _write(path, text)

    def facts_text(self, model_id: str, commit: str) -> str | None:
        """Return the kept facts of a commit as JSON."""
        try:
            return (self.storage(model_id) / "shardring" / f"{commit}.json").read_text()
        except (OSError, UnicodeDecodeError):
            return None

    def keep_facts_text(self, model_id: str, commit: str, text: str) -> None:
        """Keep a commit's facts: the headers of weights that are not on disk cannot be re-read."""
        _write(self.storage(model_id) / "shardring" / f"{commit}.json", text)

    def keep_ref(self, model_id: str, revision: str, commit: str) -> None:
        """Note what a branch or tag means, as huggingface_hub does."""
        if not is_commit(revision) and self.refs(model_id).get(revision) != commit:
            _write(self.storage(model_id) / "refs" / revision, commit)

    def available_bytes(self) -> int:
        """Return the room on the file system that the folder is, or will be, on."""
        folder = self.folder
        while not folder.exists():
            folder = folder.parent
        return shutil.disk_usage(folder).free

    def remove(self, model_id: str) -> int:
        """Remove everything of a model, and return the bytes of the files removed."""
        storage = self.storage(model_id)
        freed = 0
        for folder, _, names in os.walk(storage):
            for name in names:
                stat = os.lstat(Path(folder, name))
                freed += 0 if stat.st_nlink > 1 else stat.st_size
        shutil.rmtree(storage)
        shutil.rmtree(self.folder / ".locks" / storage.name, ignore_errors=True)
        return freed


def _write(path: Path, text: str) -> None:
    """Write a file so that a reader sees all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
