"""What the hub's refusals mean to people."""

import errno
import time

import httpx2
from huggingface_hub.errors import (
    DisabledRepoError,
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from services.common.errors import Reason, ShardringError
from services.downloads.domain.header import Malformed
from services.downloads.worker.waits import told_wait

_RETRY_SECONDS = 5.0
# What the hub says of a token that is wrong or was withdrawn.
_BAD_TOKEN = "Invalid credentials in Authorization header"
_LOGIN = "Set HF_TOKEN on the node to a token that may read it."


def hub_error(error: Exception, model_id: str, revision: str, endpoint: str) -> ShardringError:
    """Return what an error of huggingface_hub, HTTP or the disk means, with what to do."""
    named: dict[str, object] = {"model_id": model_id}
    if isinstance(error, ShardringError):
        return error
    if isinstance(error, DisabledRepoError):
        return _denied(f"{model_id} is disabled on {endpoint}. Take another model.", named)
    if isinstance(error, GatedRepoError):
        return _denied(
            f"{model_id} is gated: ask for access at {endpoint}/{model_id}. {_LOGIN}", named
        )
    if isinstance(error, RevisionNotFoundError):
        return _not_found(f"{model_id} has no revision {revision!r}.", model_id, revision)
    if isinstance(error, RepositoryNotFoundError):
        return _not_found(
            f"{endpoint} has no model {model_id!r}. Check the spelling. Is it private? {_LOGIN}",
            model_id,
            revision,
        )
    if isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        # "Neither on disk nor from the hub": the reason is why the hub did not answer.
        return hub_error(error.__cause__, model_id, revision, endpoint)
    if isinstance(error, EntryNotFoundError):
        return _not_found(f"A file of {model_id} is gone from {endpoint}.", model_id, revision)
    if isinstance(error, HfHubHTTPError):
        return _refused(error.response, model_id, revision, endpoint)
    if isinstance(error, OfflineModeIsEnabled):
        return offline_error(model_id, endpoint)
    if isinstance(error, httpx2.HTTPError | httpx2.InvalidURL | ConnectionError | TimeoutError):
        return _unreachable(
            f"Cannot reach the hub {endpoint}: {str(error).rstrip('.') or type(error).__name__}. "
            "Check the network and HF_ENDPOINT.",
            named,
            endpoint,
        )
    if isinstance(error, Malformed):
        return ShardringError(
            Reason.MODEL_MALFORMED,
            f"What {endpoint} says about {model_id} cannot be used: {error}.",
            metadata={**named, "fault": error},
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ShardringError(
            Reason.DISK_FULL,
            "The node's disk is full. Free some space, then start the download again: it goes on "
            "from what is there.",
            metadata=named,
        )
    if isinstance(error, OSError) and error.errno is None:
        # So huggingface_hub reports a body of the wrong length.
        return ShardringError(
            Reason.DOWNLOAD_FAILED,
            f"{endpoint} sent a file of {model_id} with another size than it announced. Start the "
            "download again; if it stays so, the hub is at fault.",
            metadata=named,
        )
    return ShardringError(
        Reason.DOWNLOAD_FAILED, f"Fetching {model_id} failed: {error}", metadata=named
    )


def _refused(
    answer: httpx2.Response, model_id: str, revision: str, endpoint: str
) -> ShardringError:
    """Return what a status means that huggingface_hub has no name for."""
    code = answer.status_code
    named: dict[str, object] = {"model_id": model_id}
    if code == 401 and answer.headers.get("X-Error-Message") == _BAD_TOKEN:
        return _denied(
            f"{endpoint} does not know this node's token. Set HF_TOKEN on the node to a valid one, "
            "or to none for a model that is open to all.",
            named,
        )
    if code in (401, 403):
        return _denied(
            f"{endpoint} does not let this node read {model_id} (HTTP {code}). {_LOGIN}", named
        )
    if code == 404:
        return _not_found(f"{endpoint} has no model {model_id!r}.", model_id, revision)
    if code == 429:
        wait = told_wait(answer.headers, time.time())
        when = "later" if wait is None else f"in {wait:.0f} s"
        return _unreachable(
            f"{endpoint} takes no more requests from this node for now (HTTP 429). Try again "
            f"{when}; a token in HF_TOKEN allows more of them.",
            named,
            endpoint,
            retry_delay_seconds=wait or _RETRY_SECONDS,
        )
    return _unreachable(f"{endpoint} answered HTTP {code}. Try again later.", named, endpoint)


def offline_error(model_id: str, endpoint: str) -> ShardringError:
    """Return the error for something that only the hub has, while it may not be asked."""
    return _unreachable(
        f"{model_id} is not whole on this node's disk, and offline mode is set. Unset "
        "HF_HUB_OFFLINE or copy its files.",
        {"model_id": model_id},
        endpoint,
    )


def _not_found(message: str, model_id: str, revision: str) -> ShardringError:
    return ShardringError(
        Reason.MODEL_NOT_FOUND, message, metadata={"model_id": model_id, "revision": revision}
    )


def _denied(message: str, named: dict[str, object]) -> ShardringError:
    return ShardringError(Reason.MODEL_ACCESS_DENIED, message, metadata=named)


def _unreachable(
    message: str,
    named: dict[str, object],
    endpoint: str,
    *,
    retry_delay_seconds: float = _RETRY_SECONDS,
) -> ShardringError:
    return ShardringError(
        Reason.HUB_UNREACHABLE,
        message,
        metadata={**named, "hub": endpoint},
        retry_delay_seconds=retry_delay_seconds,
    )
