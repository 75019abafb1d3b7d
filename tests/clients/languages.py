"""The programs under clients/, one for each language: what they need, built and run."""

import asyncio
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "clients.md"
BUILD_SECONDS = 400.0
RUN_SECONDS = 150.0
PROXIES = ("http_proxy", "https_proxy", "grpc_proxy")
NOBODYS_PROXY = dict.fromkeys(PROXIES, "http://127.0.0.1:9")


@dataclass(frozen=True)
class Language:
    """`program`: below the clone. `needed`: programs and files that building takes."""

    title: str
    program: str
    needed: tuple[str, ...]

    @property
    def section(self) -> str:
        """The language's part of docs/clients.md."""
        _, _, rest = PAGE.read_text().partition(f"\n## {self.title}\n")
        return rest.partition("\n## ")[0]

    @property
    def commands(self) -> str:
        """What the page says to run."""
        (commands,) = re.findall(r"^```sh\n(.*?)^```$", self.section, re.M | re.S)
        return str(commands)

    @property
    def packages(self) -> str:
        """Debian's packages, as the page names them."""
        (packages,) = re.findall(r"^```text\napt-get install (.*?)^```$", self.section, re.M | re.S)
        words = packages.replace("\\", "").split()
        return " ".join(word for word in words if not word.startswith("-"))

    def missing(self) -> str:
        """Return what this machine lacks for it, "" when it lacks nothing."""
        for name in self.needed:
            if not (Path(name).exists() if name.startswith("/") else shutil.which(name)):
                return f"{name} is missing; install Debian's packages {self.packages}"
        return ""


JAVA_JARS = ("grpc-netty", "grpc-protobuf", "grpc-stub", "protobuf", "guava", "perfmark-api")
GO_SOURCES = ("google.golang.org/grpc", "google.golang.org/protobuf", "google.golang.org/genproto")
LANGUAGES = {
    "node": Language("Node", "clients/node/client.js", ("node", "npm")),
    "go": Language(
        "Go",
        "clients/go/build/client",
        (
            *("go", "gcc", "protoc", "protoc-gen-go", "protoc-gen-go-grpc"),
            *(f"/usr/share/gocode/src/{source}" for source in GO_SOURCES),
        ),
    ),
    "java": Language(
        "Java",
        "clients/java/build/client",
        (
            *("javac", "protoc", "grpc_java_plugin"),
            *(f"/usr/share/java/{jar}.jar" for jar in JAVA_JARS),
        ),
    ),
    "cpp": Language(
        "C++",
        "clients/cpp/build/client",
        ("g++", "pkg-config", "protoc", "grpc_cpp_plugin", "/usr/include/grpcpp/grpcpp.h"),
    ),
}


def clone(folder: Path) -> Path:
    """Copy what a clone brings for the clients, without anything that was built."""
    ignore = shutil.ignore_patterns("build", "node_modules")
    shutil.copytree(ROOT / "clients", folder / "clients", ignore=ignore)
    shutil.copytree(ROOT / "protos" / "shardring", folder / "protos" / "shardring")
    return folder


def build(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Run the page's first command for each language in a clone, all at once.

    Returns what those printed that failed, by language.
    """
    running = {
        name: subprocess.Popen(
            LANGUAGES[name].commands.splitlines()[0],
            shell=True,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # So that compilers end with it.
            start_new_session=True,
        )
        for name in names
    }
    failed = {}
    end = time.monotonic() + BUILD_SECONDS
    try:
        for name, process in running.items():
            printed, _ = process.communicate(timeout=max(0, end - time.monotonic()))
            if process.returncode:
                failed[name] = printed or f"exit status {process.returncode}"
    except subprocess.TimeoutExpired:
        failed[name] = f"not built within {BUILD_SECONDS:.0f} s"
    finally:
        for process in running.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
    return failed


@dataclass(frozen=True)
class Ran:
    """What a program did. `out` and `err` are what it printed."""

    status: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        """Its output's lines; an error on standard error would be overlooked there."""
        assert self.status == 0, self.err
        return self.out.splitlines()


@dataclass(frozen=True)
class Program:
    """A language's client, built."""

    name: str
    clone: Path

    async def run(self, *arguments: str, standard_input: str = "") -> Ran:
        """Run it to its end, within RUN_SECONDS, in an environment with a proxy not to be used."""
        process = await asyncio.create_subprocess_exec(
            self.clone / LANGUAGES[self.name].program,
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={"PATH": os.environ["PATH"], "HOME": str(self.clone), **NOBODYS_PROXY},
        )
        try:
            async with asyncio.timeout(RUN_SECONDS):
                out, err = await process.communicate(standard_input.encode())
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert process.returncode is not None
        return Ran(process.returncode, out.decode(), err.decode())
