"""The cluster of deploy/compose.yaml on a Docker engine, and what can be done to it."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from services.cli.client import ClientOptions, Cluster
from services.cli.joining import PLACEMENT_PORT
from services.common.addresses import HostPort
from services.common.channel import Remote
from tests.compose.engine import Engine, run

ROOT = Path(__file__).parents[2]
NODES = ("node-1", "node-2", "node-3")
CONTROL = ("topology", "downloads", "placement-1", "placement-2")
SERVICES = (*CONTROL, "hub", *NODES, "gateway")
BUILT = ("topology", "downloads", "placement-1", "hub", "node-1", "gateway")
BASE = "shardring/test-base"
RING_NETWORK = "10.89.2.0/24"
_COPIED = ("pyproject.toml", "requirements.lock", "README.md", "LICENSE", ".dockerignore")
_FOLDERS = ("deploy", "models", "services", "protos")
# Where what was downloaded is kept from one run to the next; empty: nowhere.
_CACHE = "SHARDRING_TEST_CACHE"
_HEALTHY_SECONDS = 180.0


def fetch(folder: Path) -> tuple[Path, Path]:
    """Download the wheels of all images, and a base that needs no image registry: a tar file."""
    kept = os.environ.get(_CACHE)
    folder = Path(kept) if kept else folder
    wheels, base = folder / "wheels", folder / "base.tar"
    with ThreadPoolExecutor(2) as both:
        waited = [both.submit(_fetch_wheels, wheels), both.submit(_make_base, base)]
        for one in waited:
            one.result()
    return wheels, base


def _fetch_wheels(wheels: Path) -> None:
    if wheels.exists():
        return
    asked = run(
        *(sys.executable, ROOT / "deploy" / "requirements.py", "--build", "runner", "gateway")
    )
    fresh = wheels.with_suffix(".new")
    shutil.rmtree(fresh, ignore_errors=True)
    run(
        *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"),
        # The base's Python, whatever this one is.
        *("--only-binary", ":all:", "--python-version", "3.11", "--implementation", "cp"),
        *("--constraint", ROOT / "requirements.lock", "--dest", fresh),
        *asked.split("\n")[:-1],
    )
    fresh.rename(wheels)


def _make_base(base: Path) -> None:
    if base.exists():
        return
    base.parent.mkdir(parents=True, exist_ok=True)
    root = base.with_suffix(".root")
    packages = "python3,python3-venv,ca-certificates"
    try:
        run(
            # What it mounts is seen by itself alone, and gone with it.
            *("unshare", "--mount", "--propagation", "private", "debootstrap"),
            *("--variant=minbase", f"--include={packages}", "bookworm", root),
        )
        fresh = base.with_suffix(".new")
        run("tar", "-C", root, "--exclude=./var/cache/apt/*", "-cf", fresh, ".")
        fresh.rename(base)
    finally:
        shutil.rmtree(root, ignore_errors=True)


class Stack:
    """The cluster, built from a copy of this clone in `folder`."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self.engine = engine
        self.folder = folder
        self.environment = {
            **engine.environment,
            "BASE_IMAGE": BASE,
            "NO_INDEX": "1",
            "COMPOSE_PROJECT_NAME": "shardring",
        }
        self._compose = (
            *("docker-compose", "-f", str(folder / "deploy" / "compose.yaml")),
            *("-f", str(Path(__file__).with_name("compose.test.yaml"))),
        )

    def build(self, wheels: Path, base: Path) -> None:
        """Build the images. No image registry and no package index can be reached."""
        self.folder.mkdir()
        for name in _COPIED:
            shutil.copy2(ROOT / name, self.folder / name)
        for name in _FOLDERS:
            ignored = shutil.ignore_patterns("__pycache__", "*.whl")
            shutil.copytree(ROOT / name, self.folder / name, ignore=ignored)
        for wheel in wheels.glob("*.whl"):
            shutil.copy2(wheel, self.folder / "deploy" / "wheels")
        self.engine.docker("import", base, BASE)
        # The others run images of these, and each build would send the whole context again.
        run(*self._compose, "build", *BUILT, env=self.environment)

    def up(self) -> None:
        """Start everything; each container once those that it needs are healthy."""
        run(*self._compose, "up", "--detach", "--no-build", env=self.environment)

    async def compose(self, *words: str) -> str:
        """Run a docker-compose command; return what it printed."""
        return await self._run(*self._compose, *words)

    async def docker(self, *words: str) -> str:
        """Run a docker command; return what it printed."""
        return await self._run("docker", *words)

    async def shell(self, service: str, script: str) -> str:
        """Run a shell script in a container, as the container's own user."""
        return await self.docker("exec", await self.container(service), "sh", "-c", script)

    async def _run(self, *words: str) -> str:
        process = await asyncio.create_subprocess_exec(
            *words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=self.environment,
        )
        out, err = await process.communicate()
        if process.returncode:
            raise RuntimeError(f"{' '.join(words)}: {(out + err).decode(errors='replace')}")
        return out.decode(errors="replace")

    async def container(self, service: str) -> str:
        """Return a service's container."""
        return (await self.compose("ps", "-q", service)).strip()

    async def inspect(self, service: str) -> dict[str, Any]:
        """Return what the engine knows of a service's container."""
        found: list[dict[str, Any]] = json.loads(
            await self.docker("inspect", await self.container(service))
        )
        return found[0]

    async def address(self, service: str) -> str:
        """Return a service's address on the control network."""
        networks = (await self.inspect(service))["NetworkSettings"]["Networks"]
        return str(networks["shardring_control"]["IPAddress"])

    async def healthy(self, *services: str) -> None:
        """Return once these containers run and say that they are healthy."""
        async with asyncio.timeout(_HEALTHY_SECONDS):
            for service in services:
                while True:
                    state = (await self.inspect(service))["State"]
                    if state["Running"] and state["Health"]["Status"] == "healthy":
                        break
                    await asyncio.sleep(0.5)

    async def cluster(self) -> Cluster:
        """Return a client of the cluster; close it."""
        topology, placement, downloads = [
            await self.address(name) for name in ("topology", "placement-1", "downloads")
        ]
        return Cluster(ClientOptions(topology=topology, placement=placement, downloads=downloads))

    async def placement(self) -> Remote:
        """Return what the name `placement` stands for, both copies; close it."""
        hosts = [await self.address(name) for name in ("placement-1", "placement-2")]
        return Remote("placement", [HostPort(host, PLACEMENT_PORT) for host in hosts])

    def words(self) -> str:
        """Return the last lines of every container, for a failed test's report."""
        return run(*self._compose, "logs", "--no-color", "--tail", "40", env=self.environment)
