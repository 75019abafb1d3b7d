"""Files that `shardring install` writes, and commands that it and `uninstall` run."""

import os
import plistlib
import re
import shutil
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from services.cli.commands import install as module
from services.cli.commands.install import install, uninstall
from services.cli.services import (
    LAUNCHD,
    NAMES,
    SYSTEMD,
    Places,
    Wish,
    after_commands,
    filled,
    start_commands,
    stop_commands,
)

DEPLOY = Path(__file__).parents[3] / "deploy"
WISH = Wish(
    NAMES,
    "/opt/shardring/.venv/bin/shardring",
    "0.0.0.0",
    {"SHARDRING_JOIN": "studio-1", "SHARDRING_INSECURE": "1"},
    "ada",
    "/Users/ada",
)


def text_of(places: Places, name: str, wish: Wish = WISH) -> str:
    return filled(places, name, (DEPLOY / places.system / places.template(name)).read_text(), wish)


def test_a_unit() -> None:
    assert text_of(SYSTEMD, "node").splitlines()[6:14] == [
        "[Service]",
        "ExecStart=/opt/shardring/.venv/bin/shardring node --listen 0.0.0.0:52420",
        "Environment=SHARDRING_DATA_DIR=%S/shardring HF_HOME=%S/shardring/huggingface",
        "# What is yours to set: SHARDRING_MEMORY_GB=..., HF_TOKEN=...",
        "Environment=SHARDRING_JOIN=studio-1",
        "Environment=SHARDRING_INSECURE=1",
        "EnvironmentFile=-/etc/default/shardring",
        "DynamicUser=yes",
    ]


def test_a_daemon() -> None:
    assert plistlib.loads(text_of(LAUNCHD, "node").encode()) == {
        "Label": "dev.shardring.node",
        "UserName": "ada",
        "ProgramArguments": [WISH.program, "node", "--listen", "0.0.0.0:52420"],
        "EnvironmentVariables": {
            "HOME": "/Users/ada",
            "SHARDRING_DATA_DIR": "/Library/Application Support/Shardring",
            "HF_HOME": "/Library/Application Support/Shardring/huggingface",
            "SHARDRING_LOG_FILE": "/Library/Logs/Shardring/node.log",
            "SHARDRING_JOIN": "studio-1",
            "SHARDRING_INSECURE": "1",
        },
        "ProcessType": "Interactive",
        "RunAtLoad": True,
        "KeepAlive": True,
        "StandardErrorPath": "/Library/Logs/Shardring/node.err",
    }


@pytest.mark.parametrize("places", [SYSTEMD, LAUNCHD], ids=["systemd", "launchd"])
@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_left_to_fill_in(places: Places, name: str) -> None:
    assert not re.search("@[A-Z]+@", text_of(places, name))


def test_odd_words_arrive_as_they_are() -> None:
    odd = {"ODD": 'a b"c\\d%e$f<&>', "EMPTY": ""}
    wish = Wish(("node",), "/opt/the ring/100%/shardring", "fd00::1", odd, "ada", "/Users/ada & co")
    unit = text_of(SYSTEMD, "node", wish).splitlines()
    assert 'ExecStart="/opt/the ring/100%%/shardring" node --listen [fd00::1]:52420' in unit
    assert 'Environment="ODD=a b\\"c\\\\d%%e$f<&>"' in unit
    assert "Environment=EMPTY=" in unit
    daemon = plistlib.loads(text_of(LAUNCHD, "node", wish).encode())
    assert daemon["ProgramArguments"][0] == wish.program
    assert daemon["EnvironmentVariables"].items() >= {**odd, "HOME": wish.home}.items()


def test_a_units_certificate_is_for_root_alone() -> None:
    files = {f"SHARDRING_TLS_{part}": f"/etc/ring/{part}.pem" for part in ("CERT", "KEY", "CA")}
    unit = text_of(SYSTEMD, "topology", Wish(("topology",), "/bin/shardring", environment=files))
    for part, credential in (("CERT", "cert"), ("KEY", "key"), ("CA", "ca")):
        assert f"LoadCredential={credential}:/etc/ring/{part}.pem\n" in unit
        assert f"Environment=SHARDRING_TLS_{part}=%d/{credential}\n" in unit
    assert "TLS_KEY=/etc" not in unit


@pytest.mark.parametrize(
    "environment", [{"A": "b\nUser=root"}, {"A=B": "c"}, {"1": "c"}, {"": "c"}]
)
@pytest.mark.parametrize("places", [SYSTEMD, LAUNCHD], ids=["systemd", "launchd"])
def test_what_a_file_cannot_hold_is_refused(places: Places, environment: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"variable|control"):
        text_of(places, "node", Wish(("node",), "/bin/shardring", environment=environment))


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is missing")
def test_systemd_takes_the_units(tmp_path: Path) -> None:
    program = tmp_path / "shardring"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    for name in NAMES:
        unit = tmp_path / SYSTEMD.template(name)
        unit.write_text(text_of(SYSTEMD, name, Wish((name,), str(program), "0.0.0.0")))
        done = subprocess.run(
            ["systemd-analyze", "verify", "--recursive-errors=no", unit],
            capture_output=True,
            text=True,
        )
        # Where systemd does not run it has nothing else to say.
        assert unit.name not in done.stderr, done.stderr


def test_commands() -> None:
    names = ["topology", "node"]
    units = ["shardring-topology.service", "shardring-node.service"]
    assert start_commands(SYSTEMD, names) == [
        ["systemctl", "daemon-reload"],
        ["systemctl", "enable", *units],
        ["systemctl", "restart", *units],
    ]
    assert stop_commands(SYSTEMD, names) == [["systemctl", "disable", "--now", *units]]
    assert stop_commands(SYSTEMD, []) == []
    assert after_commands(SYSTEMD, names)[-1] == ["systemctl", "reset-failed", *units]
    assert start_commands(LAUNCHD, ["node"]) == [
        ["launchctl", "bootout", "system/dev.shardring.node"],
        ["launchctl", "enable", "system/dev.shardring.node"],
        ["launchctl", "bootstrap", "system", "/Library/LaunchDaemons/dev.shardring.node.plist"],
    ]
    assert stop_commands(LAUNCHD, ["node"]) == [
        ["launchctl", "bootout", "system/dev.shardring.node"]
    ]


class Machine:
    """A machine's files under a folder, and what `launchctl` and `systemctl` were asked.

    `answers`: what macOS 15 answers, by the command's second word: status and standard error.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.commands: list[list[str]] = []
        self.answers: dict[str, list[tuple[int, str]]] = {}

    def path(self, path: object) -> Path:
        return self.root / str(path).lstrip("/")

    def run(self, command: list[str], **_: object) -> "subprocess.CompletedProcess[str]":
        self.commands.append(command)
        status, words = (self.answers.get(command[1]) or [(0, "")]).pop(0)
        return subprocess.CompletedProcess(command, status, "", words)


@pytest.fixture(params=[SYSTEMD, LAUNCHD], ids=["systemd", "launchd"])
def machine(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Machine:
    made = Machine(tmp_path)
    places: Places = request.param
    made.path(places.folder).mkdir(parents=True)
    for folder in places.state:
        made.path(folder).parent.mkdir(parents=True, exist_ok=True)
    monkeypatch.setattr(module, "_ROOT", tmp_path)
    monkeypatch.setattr(module, "_places", lambda: places)
    monkeypatch.setattr(module, "_read_by_services", lambda: ())
    monkeypatch.setattr(module, "_program", lambda: WISH.program)
    monkeypatch.setattr(
        module, "_template", lambda p, name: (DEPLOY / p.system / p.template(name)).read_text()
    )
    monkeypatch.setattr(module, "_owner", lambda user: ("ada", "/Users/ada"))
    monkeypatch.setattr(module, "subprocess", SimpleNamespace(run=made.run))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "chown", lambda path, user: None)
    return made


def files(machine: Machine) -> set[str]:
    return {str(p.relative_to(machine.root)) for p in machine.root.rglob("*") if p.is_file()}


def call(command: "object", *words: str) -> str:
    done = CliRunner().invoke(command, words)  # type: ignore[arg-type]
    assert done.exit_code == 0, done.output
    return done.output


def test_installed_twice_and_removed_without_a_trace(machine: Machine) -> None:
    before = sorted(machine.root.rglob("*"))
    call(install, "node", "topology", "--host", "0.0.0.0", "--insecure", "--join", "studio-1")
    first = files(machine)
    assert len(first) == 2
    call(install, "node", "--join", "studio-2")
    assert files(machine) == first
    [node] = [machine.root / name for name in first if "node" in name]
    assert "studio-2" in node.read_text()
    assert "studio-1" not in node.read_text()
    places = module._places()
    written = machine.path(places.state[0]) / "huggingface"
    written.mkdir(parents=True)
    (written / "model").touch()
    call(uninstall, "topology")
    assert (written / "model").exists()
    call(uninstall)
    assert sorted(machine.root.rglob("*")) == before
    machine.commands.clear()
    call(uninstall)
    assert machine.commands == []


def test_data_is_kept_when_asked(machine: Machine) -> None:
    call(install, "node")
    kept = machine.path(module._places().state[0])
    kept.mkdir(parents=True, exist_ok=True)
    (kept / "node-id").touch()
    call(uninstall, "--keep-data")
    assert files(machine) == {str((kept / "node-id").relative_to(machine.root))}


def test_a_dry_run_touches_nothing(machine: Machine) -> None:
    before = sorted(machine.root.rglob("*"))
    shown = call(install, "node", "--dry-run")
    assert WISH.program in shown
    assert sorted(machine.root.rglob("*")) == before
    assert machine.commands == []


def test_listening_further_takes_tls_or_a_word(machine: Machine) -> None:
    done = CliRunner().invoke(install, ["node", "--host", "0.0.0.0"])
    assert done.exit_code == 1
    assert "--insecure" in done.output
    assert files(machine) == set()


def test_a_closed_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Relative to a folder that is open: what is above it is pytest's own, and closed.
    tmp_path.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    for name, mode in (("open", 0o711), ("shut", 0o770)):
        (Path(name) / "deep").mkdir(parents=True)
        Path(name).chmod(mode)
    in_open, in_shut = (Path(name) / "deep" / "program" for name in ("open", "shut"))
    assert module.closed_folder(in_open) is None
    assert module.closed_folder(in_open, in_shut) == Path("shut")


def test_what_the_system_refuses_is_told(machine: Machine) -> None:
    machine.answers = {"enable": [(1, "Failed to enable unit: Access denied")]}
    done = CliRunner().invoke(install, ["node"])
    assert done.exit_code == 1
    assert "Access denied" in done.output


def test_a_daemon_that_still_ends_is_waited_for(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """launchctl as recorded in its documentation: 36 for what is ending, 3 for what is not there,
    5 from a bootstrap too early."""
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    machine.answers = {
        "bootout": [(36, "Boot-out failed: 36: Operation now in progress")],
        "bootstrap": [(5, "Bootstrap failed: 5: Input/output error"), (0, "")],
    }
    call(install, "node")
    wanted = start_commands(module._places(), ["node"])
    if module._places() is LAUNCHD:
        wanted.append(wanted[-1])
    assert machine.commands == wanted
