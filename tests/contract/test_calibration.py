"""A real node measures its machine, in a real child process, and tells topology."""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from services.common.addresses import HostPort
from services.runner.adapters import calibration
from services.runner.calibrator import CalibrationError
from shardring.topology.v1 import topology_pb2
from tests.contract.topology_lab import Client, eventually, topology

SECONDS = 60


@asynccontextmanager
async def node(at: HostPort, folder: Path, *options: str) -> AsyncIterator[None]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.cli", "node", "--lab", "--listen", "127.0.0.1:0"),
        *("--topology", str(at), "--downloads", "127.0.0.1:9", "--data-dir", str(folder)),
        *options,
        env={**os.environ, "HF_HOME": str(folder / "hub")},
        stdout=asyncio.subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        process.terminate()
        async with asyncio.timeout(SECONDS):
            assert await process.wait() == 0


async def listed(client: Client) -> topology_pb2.Node | None:
    return next(iter((await client.get()).topology.nodes), None)


async def test_a_node_calibrates_itself_once(tmp_path: Path) -> None:
    async with topology() as (_, client):

        async def calibrated() -> bool:
            found = await listed(client)
            return found is not None and found.weight_bytes_per_second > 0

        async with node(client.address, tmp_path):
            await eventually(calibrated, SECONDS)
            first = await listed(client)
        assert first is not None
        kept = json.loads((tmp_path / "calibration.json").read_text())
        assert kept["weight_bytes_per_second"] == first.weight_bytes_per_second
        assert kept["multiply_adds_per_second"] == first.multiply_adds_per_second > 0
        # A figure that no measurement would repeat comes from the file, at the first start after.
        kept |= {"weight_bytes_per_second": 12_345, "multiply_adds_per_second": 67_890}
        (tmp_path / "calibration.json").write_text(json.dumps(kept))
        async with node(client.address, tmp_path):
            await eventually(calibrated, SECONDS)
            again = await listed(client)
        assert again is not None
        assert (again.weight_bytes_per_second, again.multiply_adds_per_second) == (12_345, 67_890)


async def test_a_child_that_fails_is_told_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\necho first >&2; echo no memory >&2; exit 3\n")
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    with pytest.raises(CalibrationError, match="no memory"):
        await calibration.measure_in_child()
    fake.write_text("#!/bin/sh\necho nonsense\n")
    with pytest.raises(CalibrationError, match="nonsense"):
        await calibration.measure_in_child()


async def test_a_cancelled_measurement_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, pid_file = tmp_path / "python", tmp_path / "pid"
    fake.write_text(
        f"#!/bin/sh\necho $$ > {pid_file}.new; mv {pid_file}.new {pid_file}; exec sleep 60\n"
    )
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    measuring = asyncio.create_task(calibration.measure_in_child())

    async def begun() -> bool:
        return pid_file.exists()

    await eventually(begun)
    measuring.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await measuring
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)
