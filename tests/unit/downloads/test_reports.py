"""A worker speaks for its own node only, and its figures make sense."""

from dataclasses import replace

import pytest

from services.common.errors import Reason, ShardringError
from services.downloads.domain.records import CachedModel, Download, DownloadState, FileProgress
from services.downloads.domain.reports import check_cached, check_download, check_worker_id

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


@pytest.mark.parametrize("node_id", ["", "n" * 300, "a\nb"])
def test_a_worker_has_a_nodes_id(node_id: str) -> None:
    with pytest.raises(ShardringError):
        check_worker_id(node_id)
