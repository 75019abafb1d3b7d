"""A worker speaks for its own node only, and its figures make sense."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from services.common.errors import Reason, ShardringError
from services.downloads.domain.records import (
    CachedModel,
    Download,
    DownloadState,
    FileProgress,
    Verification,
)
from services.downloads.domain.reports import (
    check_cached,
    check_disk,
    check_download,
    check_hub_port,
    check_verification,
    check_worker_id,
)

GOOD = Download(
    download_id="d-1",
    node_id="n1",
    model_id="org/name",
    revision="main",
    layers=None,
    state=DownloadState.ONGOING,
    create_time=1.7e9,
    update_time=1.7e9,
    downloaded_bytes=5,
    total_bytes=5,
)


@pytest.mark.parametrize(
    "bad",
    [
        replace(GOOD, node_id="n2"),
        replace(GOOD, download_id=""),
        replace(GOOD, download_id="d" * 300),
        replace(GOOD, model_id="../x"),
        replace(GOOD, create_time=-1.0),
        replace(GOOD, update_time=3e11),
        replace(GOOD, update_time=float("nan")),
        replace(GOOD, downloaded_bytes=-1),
        replace(GOOD, downloaded_bytes=6),
        replace(GOOD, bytes_per_second=-1),
        replace(GOOD, files=(FileProgress("a", 2, 1),)),
        replace(GOOD, files=(FileProgress("a", -1, 1),)),
        replace(GOOD, files=(FileProgress("a", 1, 1, bytes_per_second=-1),)),
        replace(GOOD, files=(FileProgress("../a", 1, 1),)),
        replace(GOOD, files=tuple(FileProgress(f"f-{i}", 1, 1) for i in range(5000))),
    ],
)
def test_a_download_that_cannot_be_is_refused(bad: Download) -> None:
    check_download("n1", GOOD)
    with pytest.raises(ShardringError) as refusal:
        check_download("n1", bad)
    assert refusal.value.reason is Reason.INVALID_FIELD


@pytest.mark.parametrize("bad", [("../x", 1, 1), ("org/name", -1, 1), ("org/name", 0, -1)])
def test_a_cached_model_that_cannot_be_is_refused(bad: tuple[str, int, int]) -> None:
    check_cached(CachedModel("org/name", "c", (), 1, 0))
    with pytest.raises(ShardringError):
        check_cached(CachedModel(bad[0], "c", (), *bad[1:]))


@pytest.mark.parametrize(
    "names",
    [("../x",), ("/etc/passwd",), (".hidden",), ("a" * 2000,), [f"f-{i}" for i in range(5000)]],
)
def test_a_cached_model_has_files_of_a_repository(names: Sequence[str]) -> None:
    with pytest.raises(ShardringError):
        check_cached(CachedModel("org/name", "c", (), 1, 0, whole_files=frozenset(names)))


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_hub_is_at_a_port(port: int) -> None:
    check_hub_port(0)
    check_hub_port(65535)
    with pytest.raises(ShardringError):
        check_hub_port(port)


@pytest.mark.parametrize("node_id", ["", "n" * 300, "a\nb"])
def test_a_worker_has_a_nodes_id(node_id: str) -> None:
    with pytest.raises(ShardringError):
        check_worker_id(node_id)


@pytest.mark.parametrize(
    "bad",
    [
        Verification(-1, 5),
        Verification(6, 5),
        Verification(1, 5, corrupt_files=("../x",)),
        Verification(1, 5, unverifiable_files=("a\x1b[2J",)),
    ],
)
def test_a_verification_that_cannot_be(bad: Verification) -> None:
    check_verification(Verification(1, 5, ("a/b",), ("c",), done=True))
    with pytest.raises(ShardringError):
        check_verification(bad)
    with pytest.raises(ShardringError):
        check_disk(-1)
