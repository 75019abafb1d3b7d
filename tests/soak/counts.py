"""What processes hold, as the machine counts it."""

from dataclasses import dataclass

import psutil


@dataclass(frozen=True)
class Held:
    """What one process holds. `memory_bytes`: resident."""

    descriptors: int
    threads: int
    listening: int
    children: int
    memory_bytes: int

    def __str__(self) -> str:
        return (
            f"{self.descriptors:3d} descriptors {self.threads:3d} threads {self.listening} "
            f"listening {self.children} children {self.memory_bytes / 1e6:6.1f} MB"
        )


def held(pid: int | None = None) -> Held:
    """Count what a process holds; None: this one."""
    process = psutil.Process(pid)
    with process.oneshot():
        return Held(
            descriptors=process.num_fds(),
            threads=process.num_threads(),
            listening=sum(c.status == psutil.CONN_LISTEN for c in process.net_connections("tcp")),
            children=len(process.children(recursive=True)),
            memory_bytes=process.memory_info().rss,
        )
