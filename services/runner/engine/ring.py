"""One rank's place in the MLX ring: what it sends to the right and receives from the left.

Every step travels rank 0 -> 1 -> ... -> n-1 as a header and a hidden state; the last rank sends
the sampled token on to rank 0, which is its right neighbour.

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

from services.common.addresses import parse_host_port


class Op(IntEnum):
    """What the receiver of a hidden state is to do with it."""

    PREFILL = 1  # fill the caches
    SAMPLE = 2  # fill the caches and choose the next token
    END = 3  # the request is over; carries no hidden state


@dataclass(frozen=True)
class Step:
    """One hop: what to do, and the hidden state [1, n, width] to do it with."""

    op: Op
    hidden: mx.array | None = None


_DTYPES = (mx.float32, mx.float16, mx.bfloat16)


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
        """Evaluate the step's hidden state and send it to the right neighbour."""
        hidden = step.hidden
        if hidden is None:
            header = [step.op, 0, 0, 0]
        else:
            header = [step.op, *hidden.shape[1:], _DTYPES.index(hidden.dtype)]
        first = mx.array(header, mx.int32)
        if hidden is None:
            mx.eval(mx.distributed.send(first, self.right, group=self.group))
            return
        # Sends are evaluated in any order unless one depends on the other. The header waits for
        # the hidden state to be computed: it wakes the receiver, which then should not wait long.
        announced = mx.distributed.send(mx.depends(first, hidden), self.right, group=self.group)
        mx.eval(mx.distributed.send(mx.depends(hidden, announced), self.right, group=self.group))

    def receive(self) -> Step:
        """Wait for the left neighbour's next step."""
        group = self.group
        self._arrivals.poll()
        header = mx.distributed.recv((4,), mx.int32, self.left, group=group)
        numbers: Any = header.tolist()
        op, length, width, dtype = numbers
        if op == Op.END:
            return Step(Op.END)
        shape = (1, length, width)
        hidden = mx.distributed.recv(shape, _DTYPES[dtype], self.left, group=group)
        mx.eval(hidden)
        return Step(Op(op), hidden)

    def send_token(self, token: mx.array) -> None:
        """On the last rank: send the sampled token, int32 [1], to rank 0."""
        mx.eval(mx.distributed.send(token.astype(mx.int32), self.right, group=self.group))

    def receive_token(self) -> mx.array:
        """On rank 0: wait for the token, int32 [1]."""
        self._arrivals.poll()
        token = mx.distributed.recv((1,), mx.int32, self.left, group=self.group)
        mx.eval(token)
        return token


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
