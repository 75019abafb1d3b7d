"""What the hub's refusals mean to people."""

import errno

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

_LOGIN = "Set HF_TOKEN on the node to a token that may read it."


def hub_error(error: Exception, model_id: str, revision: str, endpoint: str) -> ShardringError:
    """Return what an error of huggingface_hub, HTTP or the disk means, with what to do."""
    named: dict[str, object] = {"model_id": model_id}
    if isinstance(error, ShardringError):
        return error
    if isinstance(error, GatedRepoError | DisabledRepoError):
        return ShardringError(
            Reason.MODEL_ACCESS_DENIED,
            f"{endpoint} does not let this node read {model_id}: it is gated or disabled. Accept "
            f"its terms on its page. {_LOGIN}",
            metadata=named,
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
        code = error.response.status_code
        if code in (401, 403):
            return ShardringError(
                Reason.MODEL_ACCESS_DENIED,
                f"{endpoint} does not let this node read {model_id} (HTTP {code}). {_LOGIN}",
                metadata=named,
            )
        if code == 404:
            return _not_found(f"{endpoint} has no model {model_id!r}.", model_id, revision)
        return _unreachable(f"{endpoint} answered HTTP {code}. Try again later.", named, endpoint)
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


def _unreachable(message: str, named: dict[str, object], endpoint: str) -> ShardringError:
    return ShardringError(
        Reason.HUB_UNREACHABLE, message, metadata={**named, "hub": endpoint}, retry_delay_seconds=5
    )
