"""The demo as a person runs it: it answers right, and leaves nothing however it ends."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from tests.e2e.client import eventually

ROOT = Path(__file__).parents[2]
MARK = "SHARDRING_TEST_MARK"
ANSWERS = ("Paris", "Au", "Jupiter")

Demo = asyncio.subprocess.Process


@pytest_asyncio.fixture
async def demo(tmp_path: Path) -> AsyncIterator[Demo]:
    """A running demo, whose temporary files go to `tmp_path`."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.cli.demo"),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
        env={**os.environ, MARK: str(tmp_path), "TMPDIR": str(tmp_path), "COLUMNS": "120"},
    )
    yield process
    for left in processes(tmp_path):
        left.kill()
    await process.wait()


def processes(mark: Path) -> list[psutil.Process]:
    """Return the live processes that a demo and its descendants consist of."""
    found = []
    for process in psutil.process_iter():
        try:
            marked = process.environ().get(MARK) == str(mark)
            if marked and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def left_in(folder: Path) -> list[str]:
    """Return what is in it beside MLX's own cache of compiled kernels."""
    return [name for name in os.listdir(folder) if name != "mlx"]


async def output_until(demo: Demo, words: str) -> str:
    """Return what the demo printed up to these words."""
    assert demo.stdout is not None
    printed = ""
    async with asyncio.timeout(60):
        while words not in printed:
            piece = await demo.stdout.read(4096)
            assert piece, printed
            printed += piece.decode()
    return printed


async def ended(demo: Demo) -> str:
    """Return what it still prints until it has ended."""
    assert demo.stdout is not None
    async with asyncio.timeout(60):
        rest = (await demo.stdout.read()).decode()
        await demo.wait()
    return rest


async def test_the_demo_answers_right_and_cleans_up(demo: Demo, tmp_path: Path) -> None:
    printed = await output_until(demo, "3 of 3 answers are right") + await ended(demo)
    assert demo.returncode == 0
    for answer in ANSWERS:
        assert answer in printed
    for span in ("Place", "StartInstance", "StartShard", "ring init", "warm-up", "decode"):
        assert span in printed
    assert processes(tmp_path) == []
    assert left_in(tmp_path) == []


@pytest.mark.parametrize("moment", ["verified their links", "Placing it on a ring of three"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_an_interrupted_demo_leaves_nothing(
    demo: Demo, tmp_path: Path, moment: str, number: signal.Signals
) -> None:
    printed = await output_until(demo, moment)
    os.killpg(demo.pid, number)
    printed += await ended(demo)
    assert demo.returncode == 130
    assert printed.rstrip().endswith("Interrupted; everything that was started is stopped.")
    assert "Traceback" not in printed
    assert processes(tmp_path) == []
    assert left_in(tmp_path) == []


async def test_a_killed_demo_takes_its_processes_along(demo: Demo, tmp_path: Path) -> None:
    await output_until(demo, "Placing it on a ring of three")
    demo.kill()
    await demo.wait()
    await eventually(lambda: processes(tmp_path) == [])
