"""When a machine is measured, and what becomes of it; by measurements that are told when to end."""

import asyncio
import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from services.runner.adapters.calibration import CalibrationFile
from services.runner.calibrator import CalibrationError, Calibrator
from services.runner.changes import Changes
from services.runner.domain.calibration import Calibration

FOUND = Calibration(100, 200)


class Machine:
    """A node on which instances come and go, and measurements that last until told."""

    def __init__(self) -> None:
        self.idle = True
        self.changes = Changes()
        self.begun = 0
        self.cancelled = 0
        self.outcome: asyncio.Future[Calibration] = asyncio.Future()
        self.stirred = asyncio.Event()

    def set_idle(self, idle: bool) -> None:
        self.idle = idle
        self.changes.notify()

    async def measure(self) -> Calibration:
        self.begun += 1
        self.stirred.set()
        try:
            return await asyncio.shield(self.outcome)
        except asyncio.CancelledError:
            self.cancelled += 1
            self.stirred.set()
            raise

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                self.stirred.clear()
                await self.stirred.wait()

    def calibrator(self, folder: Path) -> Calibrator:
        return Calibrator(
            CalibrationFile(folder / "calibration.json", "m1"),
            self.measure,
            idle=lambda: self.idle,
            changes=self.changes,
            settle_seconds=0,
        )


async def test_measured_once_and_kept(tmp_path: Path) -> None:
    machine = Machine()
    machine.outcome.set_result(FOUND)
    first = machine.calibrator(tmp_path)
    await first.run()
    assert first.calibration == FOUND
    again = machine.calibrator(tmp_path)
    await again.recall()
    assert again.calibration == FOUND
    await again.run()
    assert machine.begun == 1


async def test_an_instance_goes_first(tmp_path: Path) -> None:
    machine = Machine()
    machine.idle = False
    calibrator = machine.calibrator(tmp_path)
    running = asyncio.create_task(calibrator.run())
    await asyncio.sleep(0.01)
    assert machine.begun == 0
    machine.set_idle(True)
    await machine.until(lambda: machine.begun == 1)
    machine.set_idle(False)
    await machine.until(lambda: machine.cancelled == 1)
    assert calibrator.calibration is None
    machine.set_idle(True)
    await machine.until(lambda: machine.begun == 2)
    machine.outcome.set_result(FOUND)
    await running
    assert calibrator.calibration == FOUND


async def test_stopping_the_node_stops_the_measurement(tmp_path: Path) -> None:
    machine = Machine()
    running = asyncio.create_task(machine.calibrator(tmp_path).run())
    await machine.until(lambda: machine.begun == 1)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert machine.cancelled == 1


async def test_a_failure_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine()
    machine.outcome.set_exception(CalibrationError("no memory"))
    calibrator = machine.calibrator(tmp_path)
    with caplog.at_level(logging.WARNING):
        await calibrator.run()
    assert calibrator.calibration is None
    assert [record.getMessage() for record in caplog.records] == [
        "This machine is not calibrated: no memory"
    ]
    assert machine.calibrator(tmp_path).calibration is None


async def test_what_cannot_be_kept_is_known_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    machine = Machine()
    machine.outcome.set_result(FOUND)
    calibrator = machine.calibrator(tmp_path / "missing")
    await calibrator.run()
    assert calibrator.calibration == FOUND
    assert "made again at the next start" in caplog.text


@pytest.mark.parametrize(
    "spoil",
    [
        lambda content: content | {"weight_bytes_per_second": 0},
        lambda content: content | {"multiply_adds_per_second": "many"},
        lambda content: content | {"made_with": content["made_with"] | {"mlx": "0.1"}},
        lambda content: content | {"made_with": content["made_with"] | {"machine": "m2"}},
        lambda content: {},
        lambda content: [],
    ],
)
def test_only_a_sound_file_of_this_machine_holds(
    tmp_path: Path, spoil: Callable[..., object]
) -> None:
    kept = CalibrationFile(tmp_path / "calibration.json", "m1")
    assert kept.read() is None
    kept.write(FOUND)
    assert kept.read() == FOUND
    kept.path.write_text(json.dumps(spoil(json.loads(kept.path.read_text()))))
    assert kept.read() is None
    kept.path.write_bytes(b"\xff{")
    assert kept.read() is None
