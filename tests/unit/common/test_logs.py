"""Where log lines go."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import logging, os, sys
from services.common import logs
logs.FILE_BYTES = 2_000
logs.start_logging("info")
for number in range(400):
    logging.getLogger("some").info("line %d", number)
print(os.environ.get(logs.LOG_FILE))
"""


def run(**environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )


def test_standard_error_by_default() -> None:
    done = run(SHARDRING_LOG_FILE="")
    assert done.stderr.count("some: line") == 400


def test_a_file_is_kept_small_and_not_handed_on(tmp_path: Path) -> None:
    done = run(SHARDRING_LOG_FILE=str(tmp_path / "node.log"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "None\n", "")
    files = {path.name: path for path in tmp_path.iterdir()}
    assert files.keys() == {"node.log", *(f"node.log.{number}" for number in range(1, 6))}
    assert all(path.stat().st_size <= 2_000 for path in files.values())
    assert "line 399" in files["node.log"].read_text()


def test_a_file_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    done = run(SHARDRING_LOG_FILE=str(tmp_path / "nowhere" / "node.log"))
    assert done.returncode
    assert "SHARDRING_LOG_FILE" in done.stderr
    assert "No such file" in done.stderr
