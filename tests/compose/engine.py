"""A Docker engine of this test's own, in namespaces of its own.

Its processes, containers included, are children of one process that ends with this one, however
that ends; its mounts and networks end with them.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

_START_SECONDS = 120.0
_STOP_SECONDS = 60.0
_CGROUPS = Path("/sys/fs/cgroup")
_RUN = Path("/run")
_PREFIX = "shardring-test-"
_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1
_PACKAGES = {
    "dockerd": "docker.io",
    "docker": "docker.io",
    "docker-compose": "docker-compose",
    "debootstrap": "debootstrap",
    "ip": "iproute2",
    "iptables": "iptables",
    "unshare": "util-linux",
}

_libc = ctypes.CDLL(None, use_errno=True)


def missing() -> str:
    """Return what this machine lacks for a Docker engine, "" when it lacks nothing."""
    if sys.platform != "linux":
        return "Docker's engine is Linux's"
    if os.geteuid() != 0:
        return "starting a Docker engine takes root"
    lacking = {package for name, package in _PACKAGES.items() if shutil.which(name) is None}
    if lacking:
        return f"Debian's packages {', '.join(sorted(lacking))} are missing"
    if not os.access(_CGROUPS, os.W_OK):
        return "there are no control groups here"
    return ""


def run(*command: str | Path, **options: object) -> str:
    """Run a command; return what it printed. Raises RuntimeError with its last words."""
    done = subprocess.run(
        [str(word) for word in command],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        **options,  # type: ignore[call-overload]
    )
    if done.returncode:
        words = (done.stdout + done.stderr).strip()[-3000:]
        raise RuntimeError(f"{' '.join(map(str, command[:4]))} ...: {words}")
    return str(done.stdout)


@contextlib.contextmanager
def own_network() -> Iterator[None]:
    """Put this thread, and what it starts, into a new network that reaches nothing else."""
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        _check(_libc.unshare(_CLONE_NEWNET))
        try:
            run("ip", "link", "set", "lo", "up")
            yield
        finally:
            _check(_libc.setns(before, _CLONE_NEWNET))
    finally:
        os.close(before)


class Engine:
    """A Docker engine that keeps everything in `folder`. Start it in a network of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "dockerd.log"
        name = f"{_PREFIX}{os.getpid()}"
        # A socket's path is short.
        self._socket = _RUN / f"{name}.sock"
        self._cgroup = name
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def environment(self) -> dict[str, str]:
        """Variables with which `docker` and `docker-compose` find this engine."""
        return {**os.environ, "DOCKER_HOST": f"unix://{self._socket}"}

    def docker(self, *words: str | Path, **options: object) -> str:
        """Run a docker command."""
        return run("docker", *words, env=self.environment, **options)

    def start(self) -> None:
        """Start it and wait until it answers. Raises RuntimeError with the last of its log."""
        _sweep()
        data = self.folder / "engine"
        data.mkdir()
        # Not this machine's own.
        settings = data / "settings.json"
        settings.write_text("{}")
        with self.log.open("wb") as sink:
            self._process = subprocess.Popen(
                [
                    *("unshare", "--mount", "--propagation", "private", "--pid", "--fork"),
                    *("--kill-child", "--mount-proc", "dockerd"),
                    *("--host", f"unix://{self._socket}"),
                    *("--data-root", str(data / "data"), "--exec-root", str(data / "exec")),
                    *("--pidfile", str(data / "pid"), "--storage-driver", "overlay2"),
                    *("--cgroup-parent", f"/{self._cgroup}"),
                    *("--exec-opt", "native.cgroupdriver=cgroupfs"),
                    *("--config-file", str(settings)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                # Ctrl-C is for the test, which ends this in order.
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        until = time.monotonic() + _START_SECONDS
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > until:
                words = self.log.read_text(errors="replace")[-2000:]
                raise RuntimeError(f"dockerd did not start: {words}")
            time.sleep(0.1)

    def stop(self) -> None:
        """End the engine and all containers, and remove what is left of them."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait(_STOP_SECONDS)
        self._socket.unlink(missing_ok=True)
        until = time.monotonic() + _STOP_SECONDS
        while left := _cgroups(self._cgroup):
            _remove(left)
            if time.monotonic() > until:
                raise RuntimeError(f"control groups are left: {left}")
            time.sleep(0.05)

    def left_behind(self) -> list[str]:
        """Return what is there of this engine after it was stopped."""
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
        return [
            *(line for line in mounts if str(self.folder) in line),
            *map(str, _cgroups(self._cgroup)),
            *([str(self._socket)] if self._socket.exists() else []),
            *_processes_naming(str(self.folder)),
        ]

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as asking:
            asking.settimeout(5)
            asking.connect(str(self._socket))
            asking.sendall(b"GET /_ping HTTP/1.0\r\n\r\n")
            return b" 200 " in asking.recv(64)
        return False


def _cgroups(name: str) -> list[Path]:
    """Return the control groups of that name and within, the innermost first."""
    roots = [_CGROUPS / name, *_CGROUPS.glob(f"*/{name}")]
    found = [path for root in roots for path in (root, *root.rglob("*")) if path.is_dir()]
    return sorted(found, key=lambda path: -len(path.parts))


def _remove(cgroups: list[Path]) -> None:
    for path in cgroups:
        with contextlib.suppress(OSError):  # its processes are on their way out
            path.rmdir()


def _sweep() -> None:
    """Remove what a run that was killed could not: its processes and mounts ended with it."""
    places = [*_RUN.glob(f"{_PREFIX}*.sock"), *_CGROUPS.glob(f"*/{_PREFIX}*")]
    for number in {path.stem.removeprefix(_PREFIX) for path in places}:
        if not Path("/proc", number).exists():
            _remove(_cgroups(f"{_PREFIX}{number}"))
            (_RUN / f"{_PREFIX}{number}.sock").unlink(missing_ok=True)


def _processes_naming(word: str) -> list[str]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if word in command and int(entry.name) != os.getpid():
                found.append(f"{entry.name}: {command}")
    return found


def _end_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _check(status: int) -> None:
    if status:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
