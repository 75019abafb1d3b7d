"""How much of each model is on this node's disk."""

from collections.abc import Sequence

from services.common.errors import Reason, ShardringError
from services.downloads.domain.records import CachedModel, FileProgress, ModelFile
from services.downloads.worker.cache import Cache
from services.downloads.worker.reader import Known, ModelReader


class Shelf:
    """The cache folder's models as the service hears of them. All methods block."""

    def __init__(self, cache: Cache, reader: ModelReader) -> None:
        self._cache = cache
        self._reader = reader

    def models(self) -> list[CachedModel]:
        """Return every model and commit in the cache folder."""
        return [model for model_id in self._cache.model_ids() for model in self.model(model_id)]

    def model(self, model_id: str) -> list[CachedModel]:
        """Return every commit of one model in the cache folder."""
        refs = self._cache.refs(model_id)
        return [
            self._cached(model_id, commit, refs) for commit in sorted(self._cache.commits(model_id))
        ]

    def progress(
        self, model_id: str, known: Known, files: Sequence[ModelFile]
    ) -> tuple[FileProgress, ...]:
        """Return how much of each file is on disk.

        A file of another size than it must have counts nothing: it will be fetched anew.
        """
        whole = self._cache.sizes(model_id, known.commit)
        partial = self._cache.partial_sizes(model_id)
        progress = []
        for file in files:
            size = file.size_bytes
            if file.name in whole:
                done = size if whole[file.name] == size else 0
            else:
                listed = known.listing.get(file.name) if known.listing else None
                # A whole blob still has to be linked into the snapshot, so a byte short of done.
                done = max(0, min(size - 1, partial.get(listed.etag, 0))) if listed else 0
            progress.append(FileProgress(file.name, done, size))
        return tuple(progress)

    def whole(self, model_id: str, commit: str, files: Sequence[ModelFile]) -> bool:
        """True when every file stands in the snapshot with its full size."""
        sizes = self._cache.sizes(model_id, commit)
        return all(sizes.get(file.name) == file.size_bytes for file in files)

    def remove(self, model_id: str) -> int:
        """Remove a model; return the bytes freed. Raises MODEL_NOT_FOUND."""
        if model_id not in self._cache.model_ids():
            raise ShardringError(
                Reason.MODEL_NOT_FOUND,
                f"{model_id} is not on this node's disk.",
                metadata={"model_id": model_id},
            )
        freed = self._cache.remove(model_id)
        self._reader.forget(model_id)
        return freed

    def _cached(self, model_id: str, commit: str, refs: dict[str, str]) -> CachedModel:
        revisions = tuple(sorted(name for name, target in refs.items() if target == commit))
        known = self._reader.local(model_id, commit)
        if known is None:
            on_disk = sum(self._cache.sizes(model_id, commit).values())
            return CachedModel(model_id, commit, revisions, on_disk, 0)
        progress = self.progress(model_id, known, known.facts.files)
        whole = [file.name for file in progress if file.whole]
        return CachedModel(
            model_id,
            commit,
            revisions,
            sum(file.downloaded_bytes for file in progress),
            sum(file.total_bytes for file in progress),
            known.facts,
            frozenset(whole if len(whole) < len(progress) else ()),
        )
