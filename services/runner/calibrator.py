"""Finds out once how fast this machine is, and never gets in the way of an instance."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from services.runner.changes import Changes
from services.runner.domain.calibration import Calibration

logger = logging.getLogger(__name__)

# A node that has just started is most likely about to be given an instance.
SETTLE_SECONDS = 5.0


class CalibrationError(Exception):
    """The machine could not be measured; the message says why."""


class Kept(Protocol):
    """Where a calibration outlives the node process."""

    def applies(self) -> bool:
        """Say whether there is anything to calibrate on this node."""
        ...

    def read(self) -> Calibration | None:
        """Return what is kept, if it is of this machine and this MLX."""
        ...

    def write(self, calibration: Calibration) -> None:
        """Keep it. Raises OSError."""
        ...


class Calibrator:
    """Knows the machine's speed after `recall`, or else once `run` has measured it."""

    def __init__(
        self,
        kept: Kept,
        measure: Callable[[], Awaitable[Calibration]],
        *,
        idle: Callable[[], bool],
        changes: Changes,
        settle_seconds: float = SETTLE_SECONDS,
    ) -> None:
        """`measure` raises CalibrationError, and stops at once when it is cancelled.

        `idle`: no instance runs on this node. `changes` tells when that may have changed.
        """
        self._kept, self._measure = kept, measure
        self._idle, self._changes = idle, changes
        self._settle_seconds = settle_seconds
        self.calibration: Calibration | None = None

    async def recall(self) -> None:
        """Take what an earlier run of the node found out, if it still holds."""
        if self._kept.applies():
            self.calibration = await asyncio.to_thread(self._kept.read)

    async def run(self) -> None:
        """Calibrate unless `recall` had something. A failure is logged: not calibrated."""
        if self.calibration is not None or not self._kept.applies():
            return
        await asyncio.sleep(self._settle_seconds)
        try:
            found = await self._measured()
        except CalibrationError as error:
            logger.warning("This machine is not calibrated: %s", error)
            return
        logger.info(
            "Calibrated: %.2f GB of weights and %.2f billion multiply-adds per second",
            found.weight_bytes_per_second / 1e9,
            found.multiply_adds_per_second / 1e9,
        )
        self.calibration = found
        try:
            await asyncio.to_thread(self._kept.write, found)
        except OSError as error:
            logger.warning("The calibration will be made again at the next start: %s", error)

    async def _measured(self) -> Calibration:
        """Measure while nothing else runs here; an instance that starts meanwhile goes first."""
        while True:
            await self._until(idle=True)
            measuring = asyncio.ensure_future(self._measure())
            disturbed = asyncio.create_task(self._until(idle=False))
            try:
                await asyncio.wait({measuring, disturbed}, return_when=asyncio.FIRST_COMPLETED)
                if measuring.done():
                    return measuring.result()
            finally:
                for task in (measuring, disturbed):
                    task.cancel()
                await asyncio.wait({measuring, disturbed})

    async def _until(self, *, idle: bool) -> None:
        while True:
            changed = self._changes.next
            if self._idle() is idle:
                return
            await changed.wait()
