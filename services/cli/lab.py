"""A whole cluster on this machine: every service and node a process of its own.

For the demo, the end-to-end tests and the benchmarks.
"""

import asyncio
import contextlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from services.common.addresses import HostPort, parse_host_port
from services.common.server import STOP_WITH_STDIN

_START_SECONDS = 60.0
_STOP_SECONDS = 15.0
_ANNOUNCED = " listens on "


class LabError(Exception):
    """A process of the lab did not start; the message brings its last words."""


@dataclass
class LabProcess:
    """One running process. `address` is where it listens; `log` what it wrote."""

    name: str
    process: asyncio.subprocess.Process
    address: HostPort
    log: Path
    arguments: tuple[str, ...]
    environment: dict[str, str]

    @property
    def pid(self) -> int:
        """The process id."""
        return self.process.pid

    def terminate(self) -> None:
        """Ask it to stop. Quiet when it is gone."""
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()

    async def kill(self) -> None:
        """Kill it as a crash would, and wait until it is gone."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()

    async def stopped(self, seconds: float = _STOP_SECONDS) -> int:
        """Wait until it ended by itself, or kill it, and return its exit status."""
        try:
            return await asyncio.wait_for(self.process.wait(), seconds)
        except TimeoutError:
            await self.kill()
            return await self.process.wait()


@dataclass
class Lab:
    """Starts processes on loopback with free ports, and ends all that it started.

    Everything they write goes into `folder`. They also end when this process does, however it
    ends. `environment` is added to theirs.
    """

    folder: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    processes: dict[str, LabProcess] = field(default_factory=dict)

    @staticmethod
    def command(*arguments: str) -> list[str]:
        """Return the words that run `shardring ARGUMENTS`."""
        return [sys.executable, "-m", "services.cli", *arguments]

    async def start(
        self,
        name: str,
        *arguments: str,
        listen: HostPort | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> LabProcess:
        """Run `shardring ARGUMENTS` until it says where it listens.

        Raises LabError when it ends before, or does not come up in time.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        log = self.folder / f"{name}.log"
        full = {**os.environ, **self.environment, **(environment or {}), STOP_WITH_STDIN: "1"}
        listening = listen or HostPort("127.0.0.1", 0)
        with log.open("ab") as sink:
            process = await asyncio.create_subprocess_exec(
                *self.command(*arguments, "--listen", str(listening)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=sink,
                env=full,
                # Ctrl-C in a terminal is for the one that ends these in order.
                start_new_session=True,
            )
        entry = LabProcess(name, process, listening, log, arguments, full)
        self.processes[name] = entry
        try:
            entry.address = await asyncio.wait_for(_announced(process), _START_SECONDS)
        except (TimeoutError, EOFError):
            await entry.kill()
            words = log.read_text(errors="replace").strip().splitlines()[-5:]
            raise LabError(f"{name} did not start:\n" + "\n".join(words)) from None
        return entry

    async def restart(self, name: str) -> LabProcess:
        """Start a process that is gone again, on its old port."""
        old = self.processes[name]
        return await self.start(
            name, *old.arguments, listen=old.address, environment=old.environment
        )

    async def start_control(self, hub_folder: Path, heartbeat_seconds: float = 1.0) -> None:
        """Start hub, topology, downloads and placement."""
        _, topology, downloads = await asyncio.gather(
            self.start("hub", "serve", "hub", str(hub_folder)),
            self.start(
                "topology",
                *("serve", "topology", "--lab", "--heartbeat-seconds", str(heartbeat_seconds)),
            ),
            self.start("downloads", "serve", "downloads"),
        )
        await self.start(
            "placement",
            *("serve", "placement", "--topology", str(topology.address)),
            *("--downloads", str(downloads.address)),
        )

    async def start_node(
        self, name: str, *, memory_gb: float = 1.0, environment: Mapping[str, str] | None = None
    ) -> LabProcess:
        """Start a node with a data folder and a model cache of its own."""
        home = self.folder / name
        return await self.start(
            name,
            *("node", "--lab", "--name", name, "--data-dir", str(home)),
            *("--topology", str(self.address("topology"))),
            *("--downloads", str(self.address("downloads"))),
            *("--memory-gb", str(memory_gb)),
            environment={
                "HF_HOME": str(home / "huggingface"),
                "HF_ENDPOINT": f"http://{self.address('hub')}",
                "HF_HUB_OFFLINE": "0",
                "HF_TOKEN": "",
                **(environment or {}),
            },
        )

    def address(self, name: str) -> HostPort:
        """Return where a process listens."""
        return self.processes[name].address

    @property
    def client_environment(self) -> dict[str, str]:
        """Variables with which the `shardring` command finds this cluster."""
        return {
            f"SHARDRING_{name.upper()}": str(self.address(name))
            for name in ("topology", "placement", "downloads")
        }

    async def stop(self) -> None:
        """End everything: nodes first, so that they can still say goodbye to the services."""
        nodes = [p for p in self.processes.values() if p.arguments[0] == "node"]
        others = [p for p in self.processes.values() if p.arguments[0] != "node"]
        for group in (nodes, others):
            for entry in group:
                entry.terminate()
            await asyncio.gather(*(entry.stopped() for entry in group))


async def _announced(process: asyncio.subprocess.Process) -> HostPort:
    assert process.stdout is not None
    while line := await process.stdout.readline():
        _, found, address = line.decode().partition(_ANNOUNCED)
        if found:
            return parse_host_port(address)
    raise EOFError
