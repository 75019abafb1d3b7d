"""`make vectors` and `make exact` tell right answers from wrong ones."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

VECTORS = Path(__file__).parents[1] / "vectors" / "placement.json"
SECONDS = 120


def run(path: Path, tool: str = "placement") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"tests.conformance.{tool}", str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)


def test_every_case_through_real_processes() -> None:
    done = run(VECTORS)
    assert done.stdout == "400 of 400 cases as expected, 0 differ\n", done.stderr
    assert done.returncode == 0


def test_a_wrong_expectation_is_a_line_and_a_count(tmp_path: Path) -> None:
    cases: list[dict[str, Any]] = json.loads(VECTORS.read_text())[:3]
    assert cases[0]["expected"]["outcome"] == "placed"
    cases[0]["expected"] = {"outcome": "infeasible"}
    path = tmp_path / "cases.json"
    path.write_text(json.dumps(cases))
    done = run(path)
    lines = done.stdout.splitlines()
    assert lines[-1] == "2 of 3 cases as expected, 1 differ"
    assert lines[0].startswith(f"case {cases[0]['case']}: placed on ")
    assert done.returncode == 1


def test_architectures_over_real_rings(tmp_path: Path) -> None:
    configs = json.loads((VECTORS.parent / "architectures.json").read_text())
    few = [c for c in configs if c["model_type"] in ("rwkv7", "nemotron_h", "helium")]
    path = tmp_path / "configs.json"
    path.write_text(json.dumps(few))
    done = run(path, "exact")
    *lines, count = done.stdout.splitlines()
    said = dict(line.split(": ", 1) for line in lines)
    assert said["helium"] == said["nemotron_h"] == "exact on 2 and 3"
    assert said["rwkv7"].startswith("refused (on 2: StagesUnsupported")
    assert (count, done.returncode) == ("2 exact, 1 refused, 0 wrong", 0)
