"""Runs the fetching child process, and ends it."""

import asyncio
import contextlib
import json
import os
import sys
from typing import Any

from services.common.errors import Reason, ShardringError
from services.downloads.worker.fetch import FetchJob

_MODULE = "services.downloads.worker.fetch"
_QUIET = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_VERBOSITY": "error"}


async def fetch(job: FetchJob) -> None:
    """Fetch every file of the job; raise why it could not be done. Cancelling kills the child."""
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        _MODULE,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, **_QUIET, "HF_ENDPOINT": job.endpoint},
        # A Ctrl-C in a terminal is for the worker, which then ends the child.
        start_new_session=True,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        child.stdin.write(job.to_json().encode() + b"\n")
        line = await child.stdout.readline()
    finally:
        if child.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # It ended by itself just now.
                child.kill()
        code = await asyncio.shield(asyncio.ensure_future(child.wait()))
    answer = _answer(line)
    if answer is None:
        raise ShardringError(
            Reason.DOWNLOAD_FAILED,
            f"The fetching process ended with code {code}. Start the download again: it goes on "
            "from what is there.",
            metadata={"model_id": job.model_id},
        )
    if answer:
        raise ShardringError(
            Reason[answer["reason"]], answer["message"], metadata=answer["metadata"]
        )


def _answer(line: bytes) -> dict[str, Any] | None:
    try:
        answer = json.loads(line)
    except ValueError:
        return None
    return answer if isinstance(answer, dict) else None
