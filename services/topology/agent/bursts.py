"""Measuring throughput by a short burst of bytes, one at a time on a machine.

A burst is bounded in bytes and in time, so that it is short on a fast link and small on a slow one.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from time import monotonic, perf_counter

from services.common.addresses import HostPort
from services.common.channel import Remote
from services.common.errors import Reason, ShardringError
from services.topology.agent.identify import identify
from shardring.topology.v1 import node_identity_service_pb2 as pb
from shardring.topology.v1.node_identity_service_pb2_grpc import NodeIdentityServiceStub

MAX_BURST_BYTES = 16 * 2**20
BURST_SECONDS = 0.25
# The first parts are small, so that a slow link shows several of them, and later ones large, so
# that a fast link isn't held up by their number.
FIRST_PART_BYTES = 16 * 2**10
MAX_PART_BYTES = 512 * 2**10
# A burst whose other end has vanished stops nobody else for longer than this.
HOLD_SECONDS = 1.5
# How long to wait for an answer, and for a burst's first part.
CONNECT_SECONDS = 1.0
RETRY_SECONDS = 2.0
# How much of the time before the last arrival is left out: connections begin slowly.
_WARM_UP_FRACTION = 0.25

_PAYLOAD = bytes(MAX_PART_BYTES)


class BurstGate:
    """Lets one burst at a time onto this machine, and none while it generates."""

    def __init__(self, node_id: str, generating: Callable[[], bool] = lambda: False) -> None:
        self._node_id = node_id
        self._generating = generating
        self._holder: object | None = None
        self._held_until = 0.0

    def busy_with(self) -> str:
        """Say why no burst may begin now; "" when one may."""
        if self._generating():
            return "generating"
        held = self._holder is not None and monotonic() < self._held_until
        return "another burst" if held else ""

    @property
    def must_stop(self) -> bool:
        """True when a burst that runs has to end at once."""
        return self._generating()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Hold the gate, for HOLD_SECONDS at most. Raises MEASUREMENT_BUSY."""
        busy_with = self.busy_with()
        if busy_with:
            raise ShardringError(
                Reason.MEASUREMENT_BUSY,
                f"This node is busy with {busy_with}; measure the link later.",
                metadata={"node_id": self._node_id, "busy_with": busy_with},
                retry_delay_seconds=RETRY_SECONDS,
            )
        holder = self._holder = object()
        self._held_until = monotonic() + HOLD_SECONDS
        try:
            yield
        finally:
            if self._holder is holder:
                self._holder = None


async def burst_parts(byte_count: int, gate: BurstGate) -> AsyncGenerator[bytes]:
    """Yield a burst's parts until all bytes are sent, its time is over, or the node generates.

    Raises MEASUREMENT_BUSY.
    """
    with gate.entered():
        until = monotonic() + BURST_SECONDS
        left, size = byte_count, FIRST_PART_BYTES
        while left > 0 and monotonic() < until and not gate.must_stop:
            part = _PAYLOAD[: min(left, size)]
            yield part
            left -= len(part)
            size = min(2 * size, MAX_PART_BYTES)


async def measure(node_id: str, address: HostPort, gate: BurstGate) -> int:
    """Return the bytes per second that come from a node at this address.

    On a connection of its own, closed afterwards, so that no probe waits behind what a slow link
    still holds. Raises MEASUREMENT_BUSY when either end takes no burst now, WRONG_NODE, and what
    `Remote` raises.
    """
    remote = Remote(f"node {node_id}", [address], node_id=node_id)
    try:
        answered = await identify(remote, timeout=CONNECT_SECONDS)
        if answered != node_id:
            raise ShardringError(
                Reason.WRONG_NODE,
                f"At {address} node {answered} answers, not node {node_id}.",
                metadata={"expected_node_id": node_id, "node_id": answered or ""},
            )
        with gate.entered():
            arrivals = await _arrivals(remote, gate)
    finally:
        await remote.close()
    rate = rate_of(arrivals)
    if rate is None:
        raise ShardringError(
            Reason.SERVICE_TIMEOUT,
            f"Nothing of a burst came from {address} in time.",
            metadata={"service": remote.service, "address": remote.address},
        )
    return rate


async def _arrivals(remote: Remote, gate: BurstGate) -> list[tuple[float, int]]:
    """Take a burst; return (seconds, bytes so far), from the moment of asking on."""
    request = pb.MeasureLinkRequest(byte_count=MAX_BURST_BYTES)
    call = NodeIdentityServiceStub(remote.channel).MeasureLink
    began = perf_counter()
    arrivals = [(0.0, 0)]
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(CONNECT_SECONDS) as limit:
            async with aclosing(remote.stream(call, request)) as responses:
                async for response in responses:
                    now = perf_counter() - began
                    if len(arrivals) == 1:
                        limit.reschedule(asyncio.get_running_loop().time() + BURST_SECONDS)
                    arrivals.append((now, arrivals[-1][1] + len(response.payload)))
                    if gate.must_stop:
                        break
    return arrivals


def rate_of(arrivals: Sequence[tuple[float, int]]) -> int | None:
    """Return bytes per second from (seconds since asking, bytes so far); None: nothing came.

    The first quarter of the time is left out. What came within one moment, because this process
    had something else to do, is counted over the time since the arrival before that.
    """
    if len(arrivals) < 2:
        return None
    (first, _), (last, total) = arrivals[1], arrivals[-1]
    warm = first + _WARM_UP_FRACTION * (last - first)
    start, before = max(arrival for arrival in arrivals[1:] if arrival[0] <= warm)
    if last <= start:
        start, before = arrivals[0]  # one part only: it took at most all the time since asking
    return max(1, round((total - before) / max(last - start, 1e-6)))
