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
    """A control group."""

    folder: Path

    def add(self, pid: int) -> None:
        """Put a process, and whatever it starts from now on, into the group."""
        for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
            with contextlib.suppress(ProcessLookupError):
                (self.folder / "cgroup.procs").write_text(str(process.pid))


@contextmanager
def group(name: str, cores: float) -> Iterator[Group | None]:
    """Make a control group that gets so many cores; None where this user may make none.

    Its processes have to be gone at the end.
    """
    quota = round(cores * _PERIOD_MICROSECONDS)
    unified = (_ROOT / "cgroup.controllers").exists()
    folder = (_ROOT if unified else _ROOT / "cpu") / f"shardring-{os.getpid()}-{name}"
    try:
        folder.mkdir()
    except OSError:
        yield None
        return
    try:
        if unified:
            (folder / "cpu.max").write_text(f"{quota} {_PERIOD_MICROSECONDS}")
        else:
            (folder / "cpu.cfs_period_us").write_text(str(_PERIOD_MICROSECONDS))
            (folder / "cpu.cfs_quota_us").write_text(str(quota))
    except OSError:
        folder.rmdir()
        yield None
        return
    try:
        yield Group(folder)
    finally:
        folder.rmdir()
