"""Processes that get only a part of a core, by way of Linux control groups of either version."""

import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

_ROOT = Path("/sys/fs/cgroup")
# Short, so that a rank that computes for some ten milliseconds feels it, and in turn long enough to
# be kept by the scheduler.
_PERIOD_MICROSECONDS = 20_000


@dataclass(frozen=True)
class Group:
    """A control group whose processes get so many cores while its brake is on."""

    folder: Path
    unified: bool
    cores: float

    def add(self, pid: int) -> None:
        """Put a process, and whatever it starts from now on, into the group."""
        for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
            with contextlib.suppress(ProcessLookupError):
                (self.folder / "cgroup.procs").write_text(str(process.pid))

    def brake(self, *, on: bool) -> None:
        """Put the brake on, or take it off. Raises OSError."""
        quota = round(self.cores * _PERIOD_MICROSECONDS)
        if self.unified:
            text = f"{quota if on else 'max'} {_PERIOD_MICROSECONDS}"
            (self.folder / "cpu.max").write_text(text)
        else:
            (self.folder / "cpu.cfs_period_us").write_text(str(_PERIOD_MICROSECONDS))
            (self.folder / "cpu.cfs_quota_us").write_text(str(quota if on else -1))


@contextmanager
def group(name: str, cores: float) -> Iterator[Group | None]:
    """Make a control group, its brake on; None where this user may make none.

    Its processes have to be gone at the end.
    """
    unified = (_ROOT / "cgroup.controllers").exists()
    folder = (_ROOT if unified else _ROOT / "cpu") / f"shardring-{os.getpid()}-{name}"
    made = Group(folder, unified, cores)
    try:
        folder.mkdir()
    except OSError:
        yield None
        return
    try:
        made.brake(on=True)
    except OSError:
        folder.rmdir()
        yield None
        return
    try:
        yield made
    finally:
        folder.rmdir()
