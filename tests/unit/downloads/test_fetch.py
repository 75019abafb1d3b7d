import errno
import hashlib
import json
from datetime import UTC, datetime
from pathlib import Path

import httpx2
import pytest
from huggingface_hub.errors import HfHubHTTPError

from services.common.errors import Reason
from services.downloads.domain.records import Download, DownloadState, FileProgress
from services.downloads.worker.budget import Budget
from services.downloads.worker.fetch import fault_of, wait_of
from services.downloads.worker.partial import Partial, TooLong, names_content
from services.downloads.worker.protocol import (
    Fault,
    FetchJob,
    FileOrder,
    Outcome,
    command_from_line,
    job_from_line,
    job_line,
    limit_line,
    order_line,
    outcome_from_line,
    outcome_line,
)
from services.downloads.worker.room import spoken_for
from services.downloads.worker.waits import told_wait

NOW = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC).timestamp()
BODY = b"the content" * 100
SHA256 = hashlib.sha256(BODY).hexdigest()
GIT = hashlib.sha1(b"blob %d\0" % len(BODY) + BODY, usedforsecurity=False).hexdigest()


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"retry-after": "120"}, 120),
        ({"retry-after": " 7 "}, 7),
        ({"retry-after": "Sun, 01 Mar 2026 12:00:30 GMT"}, 30),
        ({"retry-after": "Sun, 01 Mar 2026 11:00:00 GMT"}, 0),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "-5"}, None),
        ({"retry-after": "9" * 400}, None),
        ({"ratelimit": '"api";r=0;t=55'}, 55),
        ({"ratelimit": '"api"; r=0; t=55', "retry-after": "120"}, 55),
        ({"ratelimit": '"api";r=3;t=55'}, None),
        ({"ratelimit": '"api";r=3;t=55', "retry-after": "2"}, 2),
        ({"ratelimit": "nonsense"}, None),
    ],
)
def test_the_wait_that_an_answer_states(headers: dict[str, str], seconds: float | None) -> None:
    assert told_wait(headers, NOW) == seconds


def test_lines_say_what_was_meant() -> None:
    job = FetchJob("org/m", "c" * 40, "http://hub", None, "/cache", "/cache/models--org--m", 4)
    assert job_from_line(job_line(job)) == job
    order = FileOrder("a/b.json", 3, SHA256, "n-1", "http://10.0.0.1:9")
    assert command_from_line(order_line(order)) == order
    assert command_from_line(limit_line(2.5)) == 2.5
    outcome = Outcome("x", "n-1", 5, 3, Fault.LIED, 1.5, "DISK_FULL", "Full.\n", {"a": "b"})
    line = outcome_line(outcome)
    assert "\n" not in line
    assert outcome_from_line(line.encode()) == outcome
    assert outcome.error.reason is Reason.DISK_FULL
    assert outcome_from_line(outcome_line(Outcome("x")).encode()).fault is None
    with pytest.raises(ValueError, match="Expecting"):
        outcome_from_line(b"Traceback (most recent call last):\n")
    with pytest.raises(TypeError):
        outcome_from_line(json.dumps({"fault": None, "odd": 1}).encode())


def http_error(status: int, headers: dict[str, str] | None = None) -> HfHubHTTPError:
    request = httpx2.Request("GET", "http://hub/x")
    response = httpx2.Response(status, headers=headers, request=request)
    return HfHubHTTPError("no", response=response)


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (http_error(401), Fault.REFUSED),
        (http_error(404), Fault.REFUSED),
        (http_error(408), Fault.STALLED),
        (http_error(429), Fault.STALLED),
        (http_error(503), Fault.STALLED),
        (httpx2.ReadTimeout("late"), Fault.STALLED),
        (httpx2.ConnectError("nobody"), Fault.STALLED),
        (httpx2.RemoteProtocolError("cut"), Fault.STALLED),
        (httpx2.TooManyRedirects("round"), Fault.REFUSED),
        (httpx2.InvalidURL("odd"), Fault.REFUSED),
        (OSError(errno.ENOSPC, "full"), Fault.LOCAL),
        (PermissionError(errno.EACCES, "no"), Fault.LOCAL),
    ],
)
def test_whose_fault_an_error_is(error: Exception, fault: Fault) -> None:
    assert fault_of(error) is fault


def test_a_stated_wait_is_read_from_the_answer() -> None:
    assert wait_of(http_error(429, {"Retry-After": "3"})) == 3
    assert wait_of(http_error(503)) is None
    assert wait_of(httpx2.ReadTimeout("late")) is None


@pytest.mark.parametrize("etag", [SHA256, GIT])
def test_content_is_held_to_its_etag(tmp_path: Path, etag: str) -> None:
    assert names_content(etag)
    path = tmp_path / "part"
    path.write_bytes(BODY[:500])
    with Partial(path, etag, len(BODY), Budget()) as partial:
        assert (partial.length, partial.resumed) == (500, 500)
        partial.write(BODY[500:])
        assert partial.right()
    assert path.read_bytes() == BODY
    with Partial(path, etag, len(BODY), Budget()) as partial:
        assert partial.right()
        partial.restart()
        assert (partial.length, partial.resumed) == (0, 0)
        partial.write(BODY[:-1] + b"?")
        assert not partial.right()
    assert path.stat().st_size == len(BODY)


def test_an_etag_that_is_no_hash_holds_to_nothing(tmp_path: Path) -> None:
    assert not names_content("v1-abc")
    with Partial(tmp_path / "part", "v1-abc", 3, Budget()) as partial:
        partial.write(b"abc")
        assert partial.right()


def test_more_than_the_size_is_refused_and_what_was_too_long_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "part"
    path.write_bytes(b"0123456789")
    with Partial(path, "", 4, Budget()) as partial:
        assert partial.length == 0
        partial.write(b"0123")
        with pytest.raises(TooLong):
            partial.write(b"4")
    assert path.read_bytes() == b"0123"


def test_what_several_downloads_need_is_written_once() -> None:
    def download(name: str, state: DownloadState, *files: tuple[str, int]) -> Download:
        return Download(
            name,
            "n",
            "org/m",
            "main",
            None,
            state,
            0,
            0,
            commit="c",
            files=tuple(FileProgress(file, 10, 10 + left) for file, left in files),
        )

    others = [
        download("d-1", DownloadState.ONGOING, ("x", 100), ("y", 20)),
        download("d-2", DownloadState.PENDING, ("y", 20), ("z", 3)),
        download("d-3", DownloadState.FAILED, ("w", 1000)),
    ]
    assert spoken_for(others, "c", [FileProgress("x", 0, 110)]) == 23
    assert spoken_for(others, "other", [FileProgress("x", 0, 110)]) == 123
    assert spoken_for([], "c", []) == 0
