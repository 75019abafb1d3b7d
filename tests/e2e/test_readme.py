"""Every command in the README's `sh` and `console` blocks does what the README says.

`text` blocks are for several machines, or for root, and do not run here, except that the one after
an `sh` block must be among what that block prints.
"""

import asyncio
import json
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack, aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from services.cli.client import ClientOptions, Cluster
from services.common.errors import Reason, ShardringError
from tests.e2e.conftest import NODES

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(sh|console|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINKED_SECONDS = 60.0
BLOCK_SECONDS = 60.0
ENDED_SECONDS = 20.0


@dataclass(frozen=True)
class Block:
    """Commands, and what they must print: all of it when `exact`, else among other lines."""

    commands: str
    printed: str
    exact: bool


def blocks(readme: str) -> list[Block]:
    """Return what is to be run, in order."""
    found: list[Block] = []
    end, before = 0, ""
    for match in BLOCK.finditer(readme):
        kind, text = match.groups()
        if kind == "sh":
            found.append(Block(text, "", exact=False))
        elif kind == "console":
            for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
                command, _, printed = part.partition("\n")
                found.append(Block(command, printed, exact=True))
        elif before == "sh" and not readme[end : match.start()].strip():
            found[-1] = Block(found[-1].commands, text, exact=False)
        end, before = match.end(), kind
    return found


@dataclass(frozen=True)
class Terminals:
    """Where the README's commands run: a folder like a clone, a home, and free ports."""

    folder: Path
    environment: dict[str, str]
    hub_port: int

    async def start(self, commands: str, output: int | None = None) -> asyncio.subprocess.Process:
        """Run commands in a shell that stops at the first failure, in a session of their own."""
        return await asyncio.create_subprocess_exec(
            *("bash", "-euo", "pipefail", "-c"),
            commands.replace("52490", str(self.hub_port)),
            cwd=self.folder,
            env=self.environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=asyncio.subprocess.STDOUT if output else None,
            start_new_session=True,
        )


@pytest.fixture
def terminals(tmp_path: Path) -> Terminals:
    folder = tmp_path / "clone"
    program = folder / ".venv" / "bin" / "shardring"
    program.parent.mkdir(parents=True)
    program.symlink_to(Path(sys.executable).with_name("shardring"))
    (folder / "models").symlink_to(ROOT / "models")
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(4)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        ports = [one.getsockname()[1] for one in sockets]
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SHARDRING_", "HF_", "OTEL_"))
    }
    environment["HOME"] = str(tmp_path / "home")
    hub_port, *service_ports = ports
    environment["SHARDRING_HUB_LISTEN"] = f"127.0.0.1:{hub_port}"
    for name, port in zip(("TOPOLOGY", "PLACEMENT", "DOWNLOADS"), service_ports, strict=True):
        environment[f"SHARDRING_{name}_LISTEN"] = f"127.0.0.1:{port}"
        environment[f"SHARDRING_{name}"] = f"127.0.0.1:{port}"
    return Terminals(folder, environment, hub_port)


@pytest.fixture
async def cluster(terminals: Terminals) -> AsyncIterator[None]:
    """The cluster of the README's first block, once its nodes are linked."""
    process = await terminals.start(blocks((ROOT / "README.md").read_text())[0].commands)
    try:
        await linked(terminals.environment)
        yield
    finally:
        # As Ctrl-C does.
        os.killpg(process.pid, signal.SIGINT)
        try:
            await ended(process)
        finally:
            for pid in in_session(process.pid):
                os.kill(pid, signal.SIGKILL)


async def linked(environment: dict[str, str]) -> None:
    """Return once every node is linked to every other."""
    options = ClientOptions(
        **{name: environment[f"SHARDRING_{name.upper()}"] for name in ("topology", "downloads")}
    )
    async with asyncio.timeout(LINKED_SECONDS), Cluster(options) as cluster:
        while not await is_linked(cluster):
            await asyncio.sleep(0.1)


async def is_linked(cluster: Cluster) -> bool:
    """Return True once all nodes are linked, False when topology is not there yet."""
    try:
        async with aclosing(cluster.watch_topology()) as changes:
            async for topology in changes:
                if len(topology.links) == len(NODES) * (len(NODES) - 1):
                    return True
    except ShardringError as error:
        if error.reason is not Reason.SERVICE_UNAVAILABLE:
            raise
    return False


async def ended(process: asyncio.subprocess.Process) -> None:
    """Return once every process of this one's session is gone."""
    async with asyncio.timeout(ENDED_SECONDS):
        await process.wait()
        while in_session(process.pid):
            await asyncio.sleep(0.05)


def in_session(session: int) -> list[int]:
    """Return the living processes of a session; those that nobody has waited for yet are dead."""
    found = []
    for process in psutil.process_iter(["status"]):
        try:
            if os.getsid(process.pid) == session and process.info["status"] != "zombie":
                found.append(process.pid)
        except ProcessLookupError:
            continue
    return found


def comparable(printed: str) -> list[Any]:
    """Return lines, JSON as what it means: the order of an object's fields is not promised."""
    return [json.loads(line) if line.startswith("{") else line for line in printed.splitlines()]


# It starts two rings and a dozen commands.
@pytest.mark.timeout(240)
@pytest.mark.usefixtures("cluster")
async def test_the_readme_s_commands_do_what_it_says(terminals: Terminals) -> None:
    _, *rest = blocks((ROOT / "README.md").read_text())
    assert len(rest) >= 7
    for block in rest:
        # Each terminal of the reader's has run the README's `export`.
        path = 'export PATH="$PWD/.venv/bin:$PATH"\n'
        process = await terminals.start(path + block.commands, asyncio.subprocess.PIPE)
        async with asyncio.timeout(BLOCK_SECONDS):
            output, _ = await process.communicate()
        printed = output.decode()
        if block.exact:
            assert comparable(printed) == comparable(block.printed), block.commands
        else:
            assert process.returncode == 0, f"{block.commands}\n{printed}"
            assert block.printed in printed, block.commands
