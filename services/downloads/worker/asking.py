"""One question to the hub: asked again after the wait it states, and after its faults."""

import logging
import random
import time
from dataclasses import dataclass

import httpx2
from huggingface_hub import get_session
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import (  # type: ignore[attr-defined]  # Documented, not in __all__.
    hf_raise_for_status,
)

from services.downloads.worker.patience import Patience, patience
from services.downloads.worker.waits import told_wait

logger = logging.getLogger(__name__)

# For one read, and for one answer in all.
_TIMEOUT_SECONDS = 10.0
_READ_SECONDS = 50.0
# A hub that nothing is heard of is more often out of reach than about to come back.
_SILENCE_SECONDS = 6.0
_TOO_MANY_REQUESTS = 429
_FIRST_WAIT_SECONDS = 0.5
_LAST_WAIT_SECONDS = 8.0
# Many nodes are told the same moment: they come back one after the other.
_SPREAD_SECONDS = 0.5


@dataclass(frozen=True)
class Answer:
    """The first bytes of an answer's body, and the address of the page after it."""

    body: bytes
    next_url: str | None


def ask(url: str, headers: dict[str, str], length: int) -> Answer:
    """Return an answer's first `length` bytes; a hub that sends more is not heard out.

    Tries again while the caller's `patience` lasts. Raises what huggingface_hub or httpx2 raise,
    or TimeoutError.
    """
    waiting, began, failures = patience(), time.monotonic(), 0
    while True:
        try:
            return _get(url, headers, length, waiting)
        except (HfHubHTTPError, httpx2.TransportError) as error:
            failures += 1
            wait = _wait(error, failures, time.monotonic() - began, waiting)
            if wait is None or not waiting.wait(wait):
                raise
            logger.info("Asking the hub again after %.1f s: %s", wait, _first_line(error))


def _wait(
    error: Exception, failures: int, elapsed_seconds: float, waiting: Patience
) -> float | None:
    """Return for how long to wait before the next try; None: there is none."""
    limit = waiting.faults_seconds
    if isinstance(error, HfHubHTTPError):
        code = error.response.status_code
        if code != _TOO_MANY_REQUESTS and code < 500:
            return None
        if (told := told_wait(error.response.headers, time.time())) is not None:
            # No wait at all, told again and again, would be hammering.
            return max(told, _backoff(failures)) + random.uniform(0, _SPREAD_SECONDS)
        if code == _TOO_MANY_REQUESTS:
            return _backoff(failures)
    elif isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout):
        limit = min(limit / 4, _SILENCE_SECONDS)
    wait = _backoff(failures)
    return wait if elapsed_seconds + wait < limit else None


def _backoff(failures: int) -> float:
    # The power alone would grow without bound.
    longest = min(_LAST_WAIT_SECONDS, _FIRST_WAIT_SECONDS * (1 << min(failures - 1, 10)))
    return longest * random.uniform(0.5, 1.0)


def _get(url: str, headers: dict[str, str], length: int, waiting: Patience) -> Answer:
    until = time.monotonic() + _READ_SECONDS
    with get_session().stream("GET", url, headers=headers, timeout=_TIMEOUT_SECONDS) as answer:
        hf_raise_for_status(answer)
        read = bytearray()
        for chunk in answer.iter_bytes():
            read += chunk
            if len(read) >= length:
                break
            # One that sends a byte now and then never runs into the timeout of a read.
            if time.monotonic() > until or waiting.is_over:
                raise TimeoutError(f"no whole answer within {_READ_SECONDS:.0f} s")
        return Answer(bytes(read[:length]), answer.links.get("next", {}).get("url"))


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
