"""Who a node is: an id made once and kept on disk, and a number for each run."""

import fcntl
import os
import re
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from services.common.server import StartError

_NODE_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class Identity:
    """A node's id and when this run of it started, in nanoseconds since 1970."""

    node_id: str
    start_ns: int


@contextmanager
def held_identity(folder: Path) -> Iterator[Identity]:
    """Hold a data folder for this process, and yield the identity kept in it.

    The folder and the id are made when missing. Each run's `start_ns` is above those of all runs
    before, even if the machine's clock was set back. Raises StartError when another process holds
    the folder, or what is in it cannot be used.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / "node.lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise StartError(f"Cannot use the data folder {folder}: {error.strerror}.") from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StartError(
                f"Another node runs on the data folder {folder}. Stop it, or give this node a "
                "data folder of its own."
            ) from error
        try:
            identity = Identity(_kept_node_id(folder), _next_start_ns(folder))
        except OSError as error:
            raise StartError(f"Cannot use the data folder {folder}: {error}.") from error
        yield identity
    finally:
        os.close(lock)  # releases it, as does the end of the process, however it ends


def _kept_node_id(folder: Path) -> str:
    path = folder / "node-id"
    if not path.exists():
        _write_durably(path, uuid.uuid4().hex)
    text = path.read_text(errors="replace").strip()
    if not _NODE_ID.fullmatch(text):
        raise StartError(
            f"{path} does not hold a node id (32 hexadecimal digits). Delete it to give this "
            "machine a new identity."
        )
    return text


def _next_start_ns(folder: Path) -> int:
    path = folder / "last-start"
    try:
        last = int(path.read_text())
    except (FileNotFoundError, ValueError):
        last = 0  # the first run; a spoilt file costs no more than the clock's word
    start = max(time.time_ns(), last + 1)
    _write_durably(path, str(start))
    return start


def _write_durably(path: Path, text: str) -> None:
    """Write a file whole or not at all; the lock keeps others from doing so at the same time."""
    fresh = path.with_name(path.name + ".new")
    with fresh.open("w") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
