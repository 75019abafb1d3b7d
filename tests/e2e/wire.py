"""A slow cable between two network namespaces, for kernels without the netem queue.

    python -m tests.e2e.wire NAMESPACE INTERFACE NAMESPACE INTERFACE DELAY_MS MBIT_PER_SECOND

Makes a TAP interface of the given name in each namespace and carries frames between them, late and
at a limited rate in each direction. Says "ready" on standard output. A line "DELAY_MS
MBIT_PER_SECOND" on standard input changes both from the next frame on; its end ends the cable.
"""

import contextlib
import ctypes
import fcntl
import heapq
import os
import selectors
import struct
import sys
import time
from dataclasses import dataclass, field
from itertools import count

_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000
# What a queue holds at most; later frames are dropped, as by any switch.
_QUEUE_SECONDS = 0.05
_FRAME_BYTES = 65_536
_BATCH = 64


@dataclass
class End:
    """One end of the cable: where frames come in, and when the next one may leave."""

    file: int
    free_at: float = 0.0


@dataclass
class Cable:
    """Frames on their way, soonest first."""

    ends: tuple[End, End]
    delay_seconds: float
    bits_per_second: float
    flying: list[tuple[float, int, int, bytes]] = field(default_factory=list)
    numbers: "count[int]" = field(default_factory=count)

    def take(self, source: End, sink: End, now: float) -> None:
        """Take what has come in at one end."""
        for _ in range(_BATCH):
            try:
                frame = os.read(source.file, _FRAME_BYTES)
            except BlockingIOError:
                return
            start = max(now, source.free_at)
            if start - now > _QUEUE_SECONDS:
                continue
            source.free_at = start + 8 * len(frame) / self.bits_per_second
            arrival = source.free_at + self.delay_seconds
            heapq.heappush(self.flying, (arrival, next(self.numbers), sink.file, frame))

    def deliver(self, now: float) -> float | None:
        """Hand over what has arrived; return in how many seconds the next frame will."""
        while self.flying and self.flying[0][0] <= now:
            _, _, sink, frame = heapq.heappop(self.flying)
            # Where the interface is down, what arrives is lost.
            with contextlib.suppress(OSError):
                os.write(sink, frame)
        return self.flying[0][0] - now if self.flying else None


def tap(namespace: str, interface: str) -> End:
    """Make a TAP interface; this process moves to its namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    where = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    if libc.setns(where, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    os.close(where)
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    wanted = struct.pack("16sH22x", interface.encode(), _IFF_TAP | _IFF_NO_PI)
    fcntl.ioctl(file, _TUNSETIFF, wanted)
    return End(file)


def main(arguments: list[str]) -> None:
    """Carry frames until standard input ends."""
    one, other = tap(*arguments[0:2]), tap(*arguments[2:4])
    cable = Cable((one, other), float(arguments[4]) / 1e3, float(arguments[5]) * 1e6)
    selector = selectors.DefaultSelector()
    selector.register(one.file, selectors.EVENT_READ, (one, other))
    selector.register(other.file, selectors.EVENT_READ, (other, one))
    selector.register(0, selectors.EVENT_READ)
    print("ready", flush=True)
    while True:
        for key, _ in selector.select(cable.deliver(time.monotonic())):
            if key.fd:
                source, sink = key.data
                cable.take(source, sink, time.monotonic())
                continue
            words = os.read(0, 1024).split()
            if not words:
                return
            cable.delay_seconds, cable.bits_per_second = (
                float(words[0]) / 1e3,
                float(words[1]) * 1e6,
            )


if __name__ == "__main__":
    main(sys.argv[1:])
