"""One burst at a time, none while generating, bounded in bytes and time, and what it tells."""

import pytest

from services.common.errors import Reason, ShardringError
from services.topology.agent import bursts
from services.topology.agent.bursts import BurstGate, burst_parts, rate_of


def busy_with(gate: BurstGate) -> str:
    """Try to enter, and say what was in the way."""
    if not gate.busy_with():
        with gate.entered():
            return ""
    with pytest.raises(ShardringError) as caught, gate.entered():
        pass
    assert caught.value.reason is Reason.MEASUREMENT_BUSY
    assert caught.value.retry_delay_seconds
    return caught.value.metadata["busy_with"]


def test_one_burst_at_a_time() -> None:
    gate = BurstGate("a")
    with gate.entered():
        assert gate.busy_with() == busy_with(gate) == "another burst"
    assert gate.busy_with() == busy_with(gate) == ""


def test_none_while_the_machine_generates() -> None:
    generating = True
    gate = BurstGate("a", lambda: generating)
    assert gate.busy_with() == busy_with(gate) == "generating"
    assert gate.must_stop
    generating = False
    assert busy_with(gate) == ""
    assert not gate.must_stop


def test_a_burst_whose_other_end_vanished_holds_up_nobody_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr(bursts, "monotonic", lambda: now)
    gate = BurstGate("a")
    lost = gate.entered()
    lost.__enter__()
    now = bursts.HOLD_SECONDS - 0.1
    assert busy_with(gate) == "another burst"
    now = bursts.HOLD_SECONDS
    with gate.entered():
        # The lost one ends at last, and must not open the gate that another one holds.
        lost.__exit__(None, None, None)
        assert busy_with(gate) == "another burst"


async def sent(byte_count: int, gate: BurstGate) -> list[int]:
    return [len(part) async for part in burst_parts(byte_count, gate)]


async def test_a_burst_has_the_asked_bytes_in_growing_parts() -> None:
    gate = BurstGate("a")
    sizes = await sent(bursts.MAX_BURST_BYTES, gate)
    assert sum(sizes) == bursts.MAX_BURST_BYTES
    assert (sizes[0], max(sizes)) == (bursts.FIRST_PART_BYTES, bursts.MAX_PART_BYTES)
    assert await sent(1, gate) == [1]
    assert gate.busy_with() == ""


async def test_a_burst_ends_with_its_time_and_when_generation_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, generating = 0.0, False
    monkeypatch.setattr(bursts, "monotonic", lambda: now)
    gate = BurstGate("a", lambda: generating)
    parts = burst_parts(bursts.MAX_BURST_BYTES, gate)
    await anext(parts)
    now = bursts.BURST_SECONDS
    with pytest.raises(StopAsyncIteration):
        await anext(parts)
    parts = burst_parts(bursts.MAX_BURST_BYTES, gate)
    await anext(parts)
    generating = True
    with pytest.raises(StopAsyncIteration):
        await anext(parts)


def test_the_rate_is_that_after_the_first_quarter_of_the_time() -> None:
    # A slow start, then 100 bytes every 10 ms.
    steady = [(0.0, 0), (0.05, 10), (0.09, 30)]
    steady += [(0.1 + 0.01 * n, 100 + 100 * n) for n in range(20)]
    assert rate_of(steady) == pytest.approx(10_000, rel=0.01)


def test_what_piled_up_while_the_process_was_busy_does_not_look_fast() -> None:
    # 10,000 a second all the time; at the start, in the middle or in the end nobody looked.
    for pause in (range(0, 40), range(30, 80), range(60, 100)):
        looked = [n for n in range(1, 101) if n not in pause]
        late = [(0.0, 0)] + [(0.01 * n, 100 * n) for n in looked]
        for n in sorted(set(pause) - {0}):
            # Read in one go as soon as somebody looks again.
            late.append((0.01 * (pause.stop) + 1e-5 * n, 100 * n))
        late.sort()
        assert rate_of(late) == pytest.approx(10_000, rel=0.35)


def test_of_a_link_so_slow_that_one_part_came_the_time_since_asking_counts() -> None:
    assert rate_of([(0.0, 0), (0.5, 1_000)]) == 2_000
    assert rate_of([(0.0, 0)]) is None


def test_a_rate_is_finite_and_positive() -> None:
    assert rate_of([(0.0, 0), (0.1, 10), (0.1, 20)]) == 200
    assert rate_of([(0.0, 0), (10.0, 1)]) == 1
