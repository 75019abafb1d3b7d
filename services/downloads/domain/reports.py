"""What a worker may report. Each refusal is INVALID_FIELD and names the field."""

from collections.abc import Mapping

from services.common.errors import invalid_field
from services.downloads.domain.names import check_model_id
from services.downloads.domain.records import CachedModel, Download, FileProgress, ModelFacts

MAX_ID_LENGTH = 256
# The last second that a Timestamp holds, and a little less than it: seconds are kept as floats.
_MAX_SECONDS = 253_402_300_000


def check_worker_id(node_id: str) -> None:
    """Refuse what cannot be a node's id."""
    if not 1 <= len(node_id) <= MAX_ID_LENGTH or not node_id.isprintable():
        raise invalid_field("hello.node_id", node_id, "a first message that names the node")


def check_cached(model: CachedModel) -> None:
    """Refuse a model that cannot lie in a cache folder."""
    check_model_id(model.model_id)
    _check_amounts({"downloaded_bytes": model.downloaded_bytes, "total_bytes": model.total_bytes})
    if model.facts is not None:
        _check_facts(model.facts)


def check_download(node_id: str, download: Download) -> None:
    """Refuse a download that is not this node's, or whose figures make no sense."""
    if download.node_id != node_id:
        raise invalid_field("download.node_id", download.node_id, f"the worker's own, {node_id}")
    if not 1 <= len(download.download_id) <= MAX_ID_LENGTH:
        raise invalid_field("download.download_id", download.download_id, "an id")
    check_model_id(download.model_id)
    for field, time in (
        ("create_time", download.create_time),
        ("update_time", download.update_time),
    ):
        if not 0 <= time <= _MAX_SECONDS:
            raise invalid_field(f"download.{field}", time, "a time since 1970")
    parts: tuple[Download | FileProgress, ...] = (download, *download.files)
    for part in parts:
        _check_amounts({"downloaded_bytes": part.downloaded_bytes, "total_bytes": part.total_bytes})
        if part.downloaded_bytes > part.total_bytes:
            raise invalid_field("downloaded_bytes", part.downloaded_bytes, "at most total_bytes")
    _check_amounts({"bytes_per_second": download.bytes_per_second})


def _check_facts(facts: ModelFacts) -> None:
    _check_amounts(
        {
            "embedding_bytes": facts.embedding_bytes,
            "head_bytes": facts.head_bytes,
            "weight_bytes": facts.weight_bytes,
            "layer_bytes": min(facts.layer_bytes, default=0),
        }
    )


def _check_amounts(amounts: Mapping[str, int]) -> None:
    for field, amount in amounts.items():
        if amount < 0:
            raise invalid_field(field, amount, "0 or more")
