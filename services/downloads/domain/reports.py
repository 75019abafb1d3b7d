"""What a worker may report. Each refusal is INVALID_FIELD and names the field."""

from collections.abc import Mapping

from services.common.errors import invalid_field
from services.downloads.domain.names import MAX_ID_LENGTH, check_file_names, check_model_id
from services.downloads.domain.records import (
    CachedModel,
    Download,
    FileProgress,
    ModelFacts,
    Verification,
)

# The last second that a Timestamp holds, and a little less than it: seconds are kept as floats.
_MAX_SECONDS = 253_402_300_000
_MAX_PORT = 65535


def check_worker_id(node_id: str) -> None:
    """Refuse what cannot be a node's id."""
    if not 1 <= len(node_id) <= MAX_ID_LENGTH or not node_id.isprintable():
        raise invalid_field("hello.node_id", node_id, "a first message that names the node")


def check_hub_port(port: int) -> None:
    """Refuse what is no port; 0 stands for none."""
    if not 0 <= port <= _MAX_PORT:
        raise invalid_field("hello.hub_port", port, f"0 to {_MAX_PORT}")


def check_cached(model: CachedModel) -> None:
    """Refuse a model that cannot lie in a cache folder."""
    check_model_id(model.model_id)
    _check_amounts({"downloaded_bytes": model.downloaded_bytes, "total_bytes": model.total_bytes})
    check_file_names("whole_files", model.whole_files)
    if model.facts is not None:
        _check_facts(model.facts)


def check_verification(verification: Verification) -> None:
    """Refuse a verification whose figures make no sense."""
    done, total = verification.verified_bytes, verification.total_bytes
    _check_amounts({"verified_bytes": done, "total_bytes": total})
    if done > total:
        raise invalid_field("verified_bytes", done, "at most total_bytes")
    check_file_names("corrupt_files", verification.corrupt_files)
    check_file_names("unverifiable_files", verification.unverifiable_files)


def check_disk(available_bytes: int) -> None:
    """Refuse what cannot be room on a disk."""
    _check_amounts({"disk.available_bytes": available_bytes})


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
    check_file_names("files", [file.name for file in download.files])
    _check_amounts(
        {
            "received_from_hub_bytes": download.received_from_hub_bytes,
            "received_from_nodes_bytes": download.received_from_nodes_bytes,
        }
    )
    _check_progress(download)
    for file in download.files:
        _check_progress(file)


def _check_progress(part: Download | FileProgress) -> None:
    # Written out: of all that is reported, this is looked at most often.
    if not 0 <= part.downloaded_bytes <= part.total_bytes:
        raise invalid_field("downloaded_bytes", part.downloaded_bytes, "0 to total_bytes")
    if part.bytes_per_second < 0:
        raise invalid_field("bytes_per_second", part.bytes_per_second, "0 or more")
    left = part.time_left_seconds
    if left is not None and not 0 <= left <= _MAX_SECONDS:
        raise invalid_field("time_left", left, "a time to come")


def _check_facts(facts: ModelFacts) -> None:
    _check_amounts(
        {
            "embedding_bytes": facts.embedding_bytes,
            "head_bytes": facts.head_bytes,
            "weight_bytes": facts.weight_bytes,
            "layer_bytes": min(facts.layer_bytes, default=0),
            "key_value_bytes_per_token": facts.key_value_bytes_per_token,
        }
    )


def _check_amounts(amounts: Mapping[str, int]) -> None:
    for field, amount in amounts.items():
        if amount < 0:
            raise invalid_field(field, amount, "0 or more")
