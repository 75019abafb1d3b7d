"""The hub's refusals, in the words people get."""

import errno

import httpx2
import pytest
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from services.common.errors import Reason, ShardringError
from services.downloads.worker.hub_errors import hub_error

HUB = "https://hub.example"


def answered(
    kind: type[HfHubHTTPError], code: int, headers: dict[str, str] | None = None
) -> HfHubHTTPError:
    response = httpx2.Response(code, headers=headers, request=httpx2.Request("GET", HUB))
    return kind("refused", response=response)


def neither(cause: Exception) -> Exception:
    error = LocalEntryNotFoundError("neither here nor there")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (answered(GatedRepoError, 403), Reason.MODEL_ACCESS_DENIED),
        (answered(HfHubHTTPError, 401), Reason.MODEL_ACCESS_DENIED),
        (answered(HfHubHTTPError, 403), Reason.MODEL_ACCESS_DENIED),
        (answered(RepositoryNotFoundError, 404), Reason.MODEL_NOT_FOUND),
        (answered(RevisionNotFoundError, 404), Reason.MODEL_NOT_FOUND),
        (answered(RemoteEntryNotFoundError, 404), Reason.MODEL_NOT_FOUND),
        (answered(HfHubHTTPError, 503), Reason.HUB_UNREACHABLE),
        (answered(HfHubHTTPError, 429), Reason.HUB_UNREACHABLE),
        (httpx2.ConnectError("no route"), Reason.HUB_UNREACHABLE),
        (httpx2.ReadTimeout("slow"), Reason.HUB_UNREACHABLE),
        (OfflineModeIsEnabled("offline"), Reason.HUB_UNREACHABLE),
        (neither(httpx2.ConnectError("no route")), Reason.HUB_UNREACHABLE),
        (OSError(errno.ENOSPC, "No space left on device"), Reason.DISK_FULL),
        (OSError("Consistency check failed"), Reason.DOWNLOAD_FAILED),
        (ValueError("odd"), Reason.DOWNLOAD_FAILED),
        (ShardringError(Reason.DISK_FULL, "full"), Reason.DISK_FULL),
    ],
)
def test_each_fault_has_its_reason(error: Exception, reason: Reason) -> None:
    met = hub_error(error, "org/name", "main", HUB)
    assert met.reason is reason
    if met is not error:
        assert met.metadata["model_id"] == "org/name"
    if reason is Reason.HUB_UNREACHABLE:
        assert met.metadata["hub"] == HUB


def test_what_to_do_is_said() -> None:
    gated = hub_error(answered(GatedRepoError, 403), "o/n", "main", HUB).message
    assert "HF_TOKEN" in gated
    assert f"ask for access at {HUB}/o/n" in gated
    said = {"X-Error-Message": "Invalid credentials in Authorization header"}
    token = hub_error(answered(HfHubHTTPError, 401, said), "o/n", "main", HUB)
    assert token.reason is Reason.MODEL_ACCESS_DENIED
    assert "does not know this node's token" in token.message
    assert "v2" in hub_error(answered(RevisionNotFoundError, 404), "o/n", "v2", HUB).message
    assert "HF_ENDPOINT" in hub_error(httpx2.ConnectError("x"), "o/n", "main", HUB).message


def test_a_stated_wait_is_passed_on() -> None:
    told = answered(HfHubHTTPError, 429, {"Retry-After": "55"})
    error = hub_error(told, "o/n", "main", HUB)
    assert error.retry_delay_seconds == 55
    assert "in 55 s" in error.message
    assert "later" in hub_error(answered(HfHubHTTPError, 429), "o/n", "main", HUB).message
