"""Names that come from outside: model ids, revisions, layer ranges, files of a listing."""

import re

from services.common.errors import ShardringError, invalid_field
from services.downloads.domain.records import Layers

DEFAULT_REVISION = "main"

_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_])?"
_MODEL_ID = re.compile(rf"{_PART}(?:/{_PART})?")
_REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./+-]{0,199}")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_BAD_FILE = re.compile(r"[\x00-\x1f\\:]")


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


def check_page_size(page_size: int) -> int:
    """Return the size of a page, 100 for 0, or raise INVALID_FIELD."""
    if not 0 <= page_size <= 1000:
        raise invalid_field("page_size", page_size, "1 to 1000, or 0 for 100")
    return page_size or 100


def bad_page_token(token: str) -> ShardringError:
    """Return the error for a page token that this service did not make."""
    return invalid_field("page_token", token, "next_page_token of the page before")


def is_commit(revision: str) -> bool:
    """True for a full commit hash, which never moves."""
    return _COMMIT.fullmatch(revision) is not None


def is_safe_file(name: str) -> bool:
    """True for a relative path that stays inside its folder and hides nothing."""
    return not _BAD_FILE.search(name) and all(
        part and not part.startswith(".") for part in name.split("/")
    )
