"""Who a node is: an id made once and kept on disk, and a number for each run."""

import fcntl
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from services.common.server import StartError
from services.topology.agent.machine import (
    MachineFacts,
    facts_from_text,
    facts_to_text,
    fingerprint,
    read_machine_facts,
    same_machine,
)

_NODE_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class Identity:
    """A node's id, when this run of it started, in nanoseconds since 1970, and what tells its
    machine and data folder from any other ("": not known)."""

    node_id: str
    start_ns: int
    fingerprint: str = ""


@contextmanager
def held_identity(
    folder: Path, read_facts: Callable[[], MachineFacts] = read_machine_facts
) -> Iterator[Identity]:
    """Hold a data folder for this process, and yield the identity kept in it.

    The folder and the id are made when missing. Each run's `start_ns` is above those of all runs
    before, even if the machine's clock was set back. Raises StartError when another process holds
    the folder, what is in it cannot be used, or the id was made on another machine, as after
    cloning a disk: two nodes must not have one id.
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
            facts = read_facts()
            node_id = _kept_node_id(folder, facts)
            identity = Identity(
                node_id, _next_start_ns(folder), fingerprint(node_id, facts, folder)
            )
        except OSError as error:
            raise StartError(f"Cannot use the data folder {folder}: {error}.") from error
        yield identity
    finally:
        os.close(lock)  # releases it, as does the end of the process, however it ends


def known_node_id(folder: Path) -> str | None:
    """Return the id kept in a data folder, also while a node holds it; None when there is none."""
    try:
        text = (folder / "node-id").read_text(errors="replace").strip()
    except OSError:
        return None
    return text if _NODE_ID.fullmatch(text) else None


def _kept_node_id(folder: Path, facts: MachineFacts) -> str:
    path, machine = folder / "node-id", folder / "machine"
    if not path.exists():
        # In this order: an id is never kept beside what an earlier owner of the folder left.
        _write_durably(machine, facts_to_text(facts))
        _write_durably(path, uuid.uuid4().hex)
    text = path.read_text(errors="replace").strip()
    if not _NODE_ID.fullmatch(text):
        raise StartError(
            f"{path} does not hold a node id (32 hexadecimal digits). Delete it to give this "
            "machine a new identity."
        )
    kept = facts_from_text(machine.read_text(errors="replace")) if machine.exists() else {}
    if not same_machine(kept, facts):
        raise StartError(
            f"The node id in {path} was made on another machine; this disk or folder seems to be "
            "a copy, and two nodes must not have one id. If the other machine still runs, or "
            f"may run again, delete {path}: this machine then gets an id of its own. If it has "
            f"been replaced by this one, delete {machine} instead: this machine then takes its "
            "place."
        )
    if kept != {**kept, **facts}:
        # Facts that this user sees and others did not, or cards that were changed.
        _write_durably(machine, facts_to_text({**kept, **facts}))
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
