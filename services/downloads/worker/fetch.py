"""The fetching child process: files of one model, each from the source it is told.

A process of its own, because fetching blocks: killing it is the one sound way to stop within a
second, and what it wrote stays. It reads a job and then commands on standard input, and writes an
outcome for each file on standard output; see `protocol`. It tries each file once: what to do about
a fault is for the worker to say. It ends when its input does, so it never outlives the worker.
"""

import logging
import os
import ssl
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from services.common.tls import Tls
from services.downloads.worker.blob import BlobFetch
from services.downloads.worker.budget import Budget
from services.downloads.worker.hub_errors import hub_error
from services.downloads.worker.origin import SourceFault
from services.downloads.worker.protocol import (
    Fault,
    FetchJob,
    FileOrder,
    Outcome,
    command_from_line,
    job_from_line,
    outcome_line,
)
from services.downloads.worker.waits import told_wait


def main() -> None:
    """Do what standard input says until it ends."""
    logging.basicConfig(level=logging.ERROR)
    if line := sys.stdin.readline():
        serve(job_from_line(line))
    # Bodies may still be on their way: without the worker they are of no use.
    os._exit(1)


def serve(job: FetchJob) -> None:
    """Fetch what is ordered, several files at a time, until standard input ends."""
    budget = Budget()
    pool = ThreadPoolExecutor(job.parallel_files)
    # Neighbours are reached directly, and send nobody elsewhere.
    neighbours = httpx2.Client(
        trust_env=False, follow_redirects=False, verify=neighbour_tls(job.tls) if job.tls else True
    )

    answering = threading.Lock()

    def answer(order: FileOrder) -> None:
        try:
            line = outcome_line(fetch(job, order, neighbours, budget))
        except BaseException:
            logging.exception("Fetching %s met an unforeseen error", order.name)
            # The worker would wait for an answer for ever: it hears of an end.
            os._exit(1)
        with answering:
            print(line, flush=True)

    for line in sys.stdin:
        command = command_from_line(line)
        if isinstance(command, FileOrder):
            pool.submit(answer, command)
        else:
            budget.limit(command)


def neighbour_tls(files: Sequence[str]) -> ssl.SSLContext:
    """Return how neighbours are met with TLS, by the files of certificate, key and CA."""
    return Tls(*map(Path, files)).client_context()


def fetch(job: FetchJob, order: FileOrder, neighbours: httpx2.Client, budget: Budget) -> Outcome:
    """Try to fetch one file; say how it went."""
    blob = BlobFetch(job, order, neighbours, budget)
    try:
        blob.run()
    except Exception as error:
        meant = (
            error.error
            if isinstance(error, SourceFault)
            else hub_error(error, job.model_id, job.commit, order.endpoint or job.endpoint)
        )
        return Outcome(
            order.name,
            order.node_id,
            blob.received_bytes,
            blob.kept_bytes,
            fault_of(error),
            wait_of(error),
            meant.reason,
            meant.message,
            meant.metadata,
        )
    return Outcome(order.name, order.node_id, blob.received_bytes, order.size_bytes)


def fault_of(error: Exception) -> Fault:
    """Return whose fault an error of HTTP or the disk is."""
    if isinstance(error, SourceFault):
        return error.fault
    if isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        # "Neither on disk nor from the hub": the cause is why the hub did not answer.
        return fault_of(error.__cause__)
    if isinstance(error, HfHubHTTPError):
        code = error.response.status_code
        return Fault.STALLED if code >= 500 or code in (408, 429) else Fault.REFUSED
    if isinstance(error, httpx2.TransportError):
        return Fault.STALLED
    if isinstance(error, httpx2.HTTPError | httpx2.InvalidURL):
        return Fault.REFUSED
    # huggingface_hub reports a body of the wrong length as an OSError without a number.
    return Fault.LIED if isinstance(error, OSError) and error.errno is None else Fault.LOCAL


def wait_of(error: Exception) -> float | None:
    """Return how long the source says to wait, if it says so."""
    if isinstance(error, HfHubHTTPError):
        return told_wait(error.response.headers, time.time())
    return None


if __name__ == "__main__":
    main()
