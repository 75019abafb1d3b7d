"""Calibration outside of the node process: a child that measures, a file that remembers."""

import asyncio
import contextlib
import importlib.metadata
import importlib.util
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from services.runner.calibrator import CalibrationError
from services.runner.domain.calibration import Calibration

# With the wait for other nodes of this machine, and for a slow disk to give MLX.
_SECONDS = 120.0
_FORMAT = 1


async def measure_in_child() -> Calibration:
    """Measure in a process of its own, which ends when this is cancelled.

    Raises CalibrationError.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.runner.engine.calibration"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        raise CalibrationError(str(error)) from error
    try:
        async with asyncio.timeout(_SECONDS):
            # Its standard input stays open: should it close, this process is gone.
            assert process.stdout is not None
            assert process.stderr is not None
            said, errors = await asyncio.gather(process.stdout.read(), process.stderr.read())
            status = await process.wait()
    except TimeoutError:
        raise CalibrationError(f"it took more than {_SECONDS:.0f} seconds") from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if status:
        words = errors.decode(errors="replace").strip().splitlines()
        raise CalibrationError(words[-1] if words else f"its process ended with status {status}")
    try:
        return _calibration(json.loads(said))
    except (ValueError, KeyError, TypeError):
        raise CalibrationError(f"its process said {said[:80]!r}") from None


@dataclass(frozen=True)
class CalibrationFile:
    """`calibration.json` in a node's data folder.

    Of use only with the MLX that it was made with, and on the machine with this fingerprint.
    """

    path: Path
    fingerprint: str

    def applies(self) -> bool:
        """Say whether MLX is there. Does not import it."""
        return importlib.util.find_spec("mlx") is not None

    def read(self) -> Calibration | None:
        """Return what is kept; None when there is nothing, or nothing that holds any more."""
        try:
            content = json.loads(self.path.read_text())
            if content["made_with"] != self._made_with():
                return None
            return _calibration(content)
        except (OSError, ValueError, KeyError, TypeError):
            # Whatever is wrong with the file, it is written anew.
            return None

    def write(self, calibration: Calibration) -> None:
        """Keep it, whole or not at all. Raises OSError."""
        content = {**asdict(calibration), "made_with": self._made_with()}
        fresh = self.path.with_name(self.path.name + ".new")
        fresh.write_text(json.dumps(content, indent=2) + "\n")
        fresh.replace(self.path)

    def _made_with(self) -> dict[str, object]:
        return {
            "format": _FORMAT,
            "mlx": importlib.metadata.version("mlx"),
            "machine": self.fingerprint,
        }


def _calibration(content: dict[str, int]) -> Calibration:
    found = Calibration(content["weight_bytes_per_second"], content["multiply_adds_per_second"])
    if not all(isinstance(value, int) and value > 0 for value in asdict(found).values()):
        raise ValueError(f"not a calibration: {content}")
    return found
