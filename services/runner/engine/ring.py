"""One rank's place in the MLX ring: what it sends to the right and receives from the left.

Every step travels rank 0 -> 1 -> ... -> n-1 as a header, commands where there are any, and a hidden
state (or tokens, where ranks split layers); the last rank sends what comes of it on to rank 0,
which is its right neighbour. Steps and answers arrive in the order they were sent.

A pending `recv` keeps a core busy until its data comes, and would take it from the rank that
computes that data. So a rank first sleeps until its neighbour's socket has something to read; the
sockets are MLX's own, recognised by the ring's ports.
"""

import json
import os
import select
import socket
import tempfile
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import mlx.core as mx
import numpy as np

from services.common.addresses import parse_host_port


class Op(IntEnum):
    """What the receiver of a step is to do with it."""

    TIDY = 0  # only the commands
    PREFILL = 1  # fill a sequence's caches with part of its prompt
    DECODE = 2  # choose the next token of each sequence of a lane


@dataclass(frozen=True)
class Step:
    """One hop. `target`: the sequence of a PREFILL, the lane of a DECODE. `commands`: JSON.

    `data`: the hidden state [B, n, width], or tokens [B, n, 1] where ranks split layers.
    """

    op: Op
    target: int = 0
    commands: bytes = b""
    data: mx.array | None = None


_DTYPES = (mx.float32, mx.float16, mx.bfloat16, mx.int32)
_HEADER_LENGTH = 7


class Ring:
    """A joined ring. Not for a ring of one."""

    def __init__(self, rank: int, hosts: tuple[str, ...]) -> None:
        """Join as `rank` with this rank's own host list; blocks until all neighbours are there.

        Raises RuntimeError when a neighbour cannot be reached or the ring is not of the size.
        """
        # A file without a name: this process may be killed while it waits for its neighbours.
        with tempfile.TemporaryFile("w+") as file:
            json.dump([[host] for host in hosts], file)
            file.seek(0)
            os.environ |= {"MLX_HOSTFILE": f"/dev/fd/{file.fileno()}", "MLX_RANK": str(rank)}
            self.group = mx.distributed.init(backend="ring", strict=True)
        self.rank, self.size = self.group.rank(), self.group.size()
        if (self.rank, self.size) != (rank, len(hosts)):
            raise RuntimeError(
                f"joined as rank {self.rank} of {self.size} instead of {rank} of {len(hosts)}"
            )
        self._arrivals = select.poll()
        for descriptor in _ring_sockets(hosts):
            self._arrivals.register(descriptor, select.POLLIN)
        self.right = (rank + 1) % self.size
        self.left = (rank - 1) % self.size

    @property
    def is_last(self) -> bool:
        """True for the rank that samples."""
        return self.rank == self.size - 1

    def send(self, step: Step) -> None:
        """Evaluate the step's data and send it to the right neighbour."""
        data = step.data
        shape = (0, 0, 0) if data is None else data.shape
        dtype = 0 if data is None else _DTYPES.index(data.dtype)
        header = [step.op, step.target, len(step.commands), *shape, dtype]
        sent = mx.array(header, mx.int32)
        if data is not None:
            # The header waits for the data to be computed: it wakes the receiver, which then
            # should not wait long.
            sent = mx.depends(sent, data)
        # Sends are evaluated in any order unless one depends on the other.
        sent = mx.distributed.send(sent, self.right, group=self.group)
        if step.commands:
            text = mx.array(np.frombuffer(step.commands, np.uint8))
            sent = mx.distributed.send(mx.depends(text, sent), self.right, group=self.group)
        if data is not None:
            sent = mx.distributed.send(mx.depends(data, sent), self.right, group=self.group)
        mx.eval(sent)

    def receive(self) -> Step:
        """Take the left neighbour's next step; call `wait` before."""
        numbers: Any = self._receive((_HEADER_LENGTH,), mx.int32).tolist()
        op, target, text_length, *shape, dtype = numbers
        text = b""
        if text_length:
            text = np.array(self._receive((text_length,), mx.uint8)).tobytes()
        data = self._receive(tuple(shape), _DTYPES[dtype]) if shape[0] else None
        return Step(Op(op), target, text, data)

    def send_answer(self, numbers: mx.array) -> None:
        """On the last rank: send int32 [n] to rank 0."""
        mx.eval(mx.distributed.send(numbers, self.right, group=self.group))

    def receive_answer(self, count: int) -> list[int]:
        """On rank 0: take the next answer, of so many numbers."""
        numbers: Any = self._receive((count,), mx.int32).tolist()
        return list(numbers)

    def wait(self, seconds: float | None = None, *others: int) -> set[int]:
        """Sleep until a neighbour sent something, or one of the descriptors `others` has something.

        Returns the descriptors that have: of `others`, and -1 for the neighbours; none after
        `seconds`.
        """
        arrivals = self._arrivals
        for descriptor in others:
            arrivals.register(descriptor, select.POLLIN)
        try:
            ready = arrivals.poll(None if seconds is None else seconds * 1000)
        finally:
            for descriptor in others:
                arrivals.unregister(descriptor)
        found = {descriptor for descriptor, _ in ready}
        return {d if d in others else -1 for d in found}

    def gather(self, numbers: list[int]) -> list[list[int]]:
        """Return every rank's numbers, in rank order; all ranks call it, with as many."""
        row = mx.array([numbers], mx.int32)
        gathered: Any = mx.distributed.all_gather(row, group=self.group).tolist()
        return list(gathered)

    def _receive(self, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
        data = mx.distributed.recv(shape, dtype, self.left, group=self.group)
        mx.eval(data)
        return data


def _ring_sockets(hosts: tuple[str, ...]) -> list[int]:
    """Return the descriptors of the connections between this rank and its neighbours.

    One end of each has a port of the host list. Raises RuntimeError when there is none, for then
    nothing would ever wake the rank.
    """
    ports = {parse_host_port(host).port for host in hosts} - {0}
    found = []
    for name in os.listdir("/dev/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as connection:
                ends = (connection.getsockname(), connection.getpeername())
        except OSError:
            continue  # a file, a listening socket, or the descriptor of the listing itself
        if any(isinstance(end, tuple) and end[1] in ports for end in ends):
            found.append(int(name))
    if not found:
        raise RuntimeError("joined the ring, but found no connection to a neighbour")
    return found
