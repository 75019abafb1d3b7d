"""Names that come from outside: model ids, revisions, layer ranges, files of a listing."""

import re
from collections.abc import Collection
from functools import lru_cache

from services.common.errors import invalid_field
from services.downloads.domain.records import Layers

DEFAULT_REVISION = "main"
MAX_IDS = 10_000
MAX_ID_LENGTH = 256
# Files of one model that anything is said about at a time.
MAX_FILE_NAMES = 4096

_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_])?"
_MODEL_ID = re.compile(rf"{_PART}(?:/{_PART})?")
_REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./+-]{0,199}")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_BAD_FILE = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff\\:]")
_MAX_FILE_LENGTH = 1024
# What file systems allow for one part of a path.
_MAX_PART_BYTES = 255
# Workers report the same names again and again.
_KEPT_NAMES = 16384


def check_model_id(model_id: str) -> str:
    """Return the id, or raise INVALID_FIELD when the hub could not have such a name."""
    if not _MODEL_ID.fullmatch(model_id) or "--" in model_id or ".." in model_id:
        raise invalid_field("model_id", model_id, 'a name such as "organisation/name"')
    return model_id


def check_revision(revision: str) -> str:
    """Return the revision, "main" for none, or raise INVALID_FIELD."""
    revision = revision or DEFAULT_REVISION
    parts = revision.split("/")
    if not _REVISION.fullmatch(revision) or ".." in revision or "" in parts or "." in parts:
        raise invalid_field("revision", revision, "a branch, tag or commit")
    return revision


def check_layers(layers: Layers | None) -> Layers | None:
    """Return the range, or raise INVALID_FIELD when it holds no layer."""
    if layers is not None and not 0 <= layers.start < layers.end:
        raise invalid_field("layers", f"{layers.start}, {layers.end}", "0 <= start < end")
    return layers


def check_ids(field: str, ids: Collection[str]) -> None:
    """Refuse more ids than anybody has a use for."""
    if len(ids) > MAX_IDS:
        raise invalid_field(field, f"{len(ids)} ids", f"at most {MAX_IDS}")


def check_file_names(field: str, names: Collection[str]) -> None:
    """Refuse names that are none of a repository's files, or too many of them."""
    if len(names) > MAX_FILE_NAMES:
        raise invalid_field(field, f"{len(names)} names", f"at most {MAX_FILE_NAMES}")
    for name in names:
        if not is_safe_file(name):
            raise invalid_field(field, name, "paths inside a repository")


def check_instance_id(instance_id: str) -> None:
    """Refuse what cannot be an instance's id; empty: none."""
    if len(instance_id) > MAX_ID_LENGTH or not instance_id.isprintable():
        raise invalid_field("instance_id", instance_id, "an instance's id, or nothing")


def is_commit(revision: str) -> bool:
    """True for a full commit hash, which never moves."""
    return _COMMIT.fullmatch(revision) is not None


def is_safe_file(name: str) -> bool:
    """True for a relative path that stays inside its folder and hides nothing."""
    return len(name) <= _MAX_FILE_LENGTH and _is_safe_file(name)


@lru_cache(_KEPT_NAMES)
def _is_safe_file(name: str) -> bool:
    return not _BAD_FILE.search(name) and all(
        part and not part.startswith(".") and len(part.encode()) <= _MAX_PART_BYTES
        for part in name.split("/")
    )
