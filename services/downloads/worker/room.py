"""Room on the disk: before a download begins, and while it goes on."""

from collections.abc import Iterable

from services.common.errors import Reason, ShardringError
from services.downloads.domain.records import Download, FileProgress


def spoken_for(downloads: Iterable[Download], commit: str, files: Iterable[FileProgress]) -> int:
    """Return the bytes that live downloads will still write beside these files of a commit.

    A file that several downloads need is written once.
    """
    mine = {(commit, file.name) for file in files}
    left = {
        (download.commit, file.name): file.total_bytes - file.downloaded_bytes
        for download in downloads
        if download.live
        for file in download.files
    }
    return sum(count for key, count in left.items() if key not in mine)


def check_room(model_id: str, node_id: str, needed_bytes: int, available_bytes: int) -> None:
    """Raise DISK_FULL when what is needed is more than there is."""
    if needed_bytes > available_bytes:
        raise disk_full(model_id, node_id, needed_bytes, available_bytes)


def disk_full(
    model_id: str, node_id: str, needed_bytes: int, available_bytes: int
) -> ShardringError:
    """Return the error for a download that does not fit, with figures."""
    available_bytes = max(0, available_bytes)
    return ShardringError(
        Reason.DISK_FULL,
        f"{model_id} needs {needed_bytes} more bytes on the disk of this node, which has "
        f"{available_bytes} to spare. Remove a model (shardring rm) or choose another node; what "
        "was fetched stays.",
        metadata={
            "node_id": node_id,
            "needed_bytes": needed_bytes,
            "available_bytes": available_bytes,
        },
    )
