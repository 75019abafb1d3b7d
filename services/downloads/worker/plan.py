"""Which files of which commit a download needs."""

from dataclasses import dataclass

from services.common.errors import ShardringError, invalid_field
from services.downloads.domain.files import needed_files
from services.downloads.domain.names import is_commit
from services.downloads.domain.records import Layers, ModelFile
from services.downloads.worker.cache import Cache
from services.downloads.worker.patience import patience, with_patience
from services.downloads.worker.reader import Known, ModelReader
from services.downloads.worker.shelf import Shelf


@dataclass(frozen=True)
class Plan:
    """The files to have on disk, all of one commit."""

    model_id: str
    known: Known
    files: tuple[ModelFile, ...]


class Planner:
    """Plans downloads. All methods block."""

    def __init__(self, cache: Cache, reader: ModelReader, shelf: Shelf) -> None:
        self._cache = cache
        self._reader = reader
        self._shelf = shelf

    def plan(self, model_id: str, revision: str, layers: Layers | None) -> Plan:
        """Resolve the revision and choose the files.

        A commit that is all on disk needs no hub; a branch is asked for, and read from disk when
        the hub does not answer. Raises the hub's error when what is on disk is not enough.
        """
        if is_commit(revision) and (plan := self._whole(model_id, revision, layers)):
            return plan
        commit = self._cache.resolve(model_id, revision)
        whole = None if commit is None else self._whole(model_id, commit, layers)
        try:
            # A hub that does not answer is not waited for when nothing is needed from it.
            with with_patience(patience() if whole is None else None):
                known = self._reader.from_hub(model_id, revision)
        except ShardringError:
            if whole is not None:
                return whole
            raise
        plan = _plan(model_id, known, layers)
        self._reader.keep(model_id, known)
        self._cache.keep_ref(model_id, revision, known.commit)
        return plan

    def whole(self, model_id: str, revision: str, layers: Layers | None) -> bool:
        """True when all files are on disk of what the revision last meant."""
        commit = self._cache.resolve(model_id, revision)
        return commit is not None and self._whole(model_id, commit, layers) is not None

    def local(self, model_id: str, commit: str, layers: Layers | None) -> Plan | None:
        """Return the plan for a commit as far as the disk knows it."""
        known = self._reader.local(model_id, commit)
        return None if known is None else _plan(model_id, known, layers)

    def _whole(self, model_id: str, commit: str, layers: Layers | None) -> Plan | None:
        plan = self.local(model_id, commit, layers)
        return plan if plan is not None and self.complete(plan) else None

    def missing(self, plan: Plan) -> list[ModelFile]:
        """Return the files that are not on disk with their full size."""
        sizes = self._cache.sizes(plan.model_id, plan.known.commit)
        return [file for file in plan.files if sizes.get(file.name) != file.size_bytes]

    def complete(self, plan: Plan) -> bool:
        """True when nothing is left to fetch."""
        return self._shelf.whole(plan.model_id, plan.known.commit, plan.files)


def _plan(model_id: str, known: Known, layers: Layers | None) -> Plan:
    try:
        return Plan(model_id, known, tuple(needed_files(known.facts, layers)))
    except ValueError as error:
        text = "" if layers is None else f"{layers.start}, {layers.end}"
        raise invalid_field("layers", text, f"a range within the model: {error}") from error
