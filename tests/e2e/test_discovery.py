"""Real processes find each other by DNS-SD on a LAN of three hosts.

The hosts are network namespaces of this machine, so the tests take root on Linux.
"""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.contract.topology_lab import eventually
from tests.e2e.network import missing, run

pytestmark = pytest.mark.skipif(bool(missing()), reason=f"no hosts to test with: {missing()}")

HOSTS = ("red", "blue", "guest")


def address(host: str) -> str:
    return f"10.66.7.{HOSTS.index(host) + 1}"


@dataclass
class Lan:
    """Three hosts at one switch, and the processes that run on them."""

    folder: Path
    prefix: str = f"srd{os.getpid()}"
    processes: list[asyncio.subprocess.Process] = field(default_factory=list)

    def build(self) -> None:
        for name in ("switch", *HOSTS):
            run("ip", "netns", "add", self.prefix + name)
            self.ip(name, "link set lo up")
        self.ip("switch", "link add lan type bridge mcast_snooping 0")
        self.ip("switch", "link set lan up")
        for host in HOSTS:
            peer = f"type veth peer name p-{host} netns {self.prefix}switch"
            run("ip", *f"link add lan0 netns {self.prefix}{host} {peer}".split())
            self.ip("switch", f"link set p-{host} master lan up")
            self.ip(host, f"addr add {address(host)}/24 dev lan0")
            self.ip(host, "link set lan0 up")

    def ip(self, host: str, command: str) -> None:
        run("ip", "-n", self.prefix + host, *command.split())

    def remove(self) -> None:
        for name in ("switch", *HOSTS):
            run("ip", "netns", "del", self.prefix + name, must=False)

    async def spawn(self, host: str, *arguments: str) -> asyncio.subprocess.Process:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("SHARDRING_")}
        return await asyncio.create_subprocess_exec(
            *("ip", "netns", "exec", self.prefix + host),
            *(sys.executable, "-m", "services.cli", *arguments),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={
                **environment,
                "SHARDRING_DATA_DIR": str(self.folder / host),
                "SHARDRING_INSECURE": "1",
            },
        )

    async def start(self, host: str, *arguments: str) -> None:
        """Start a service or node that runs until the end of the test."""
        process = await self.spawn(host, *arguments)
        self.processes.append(process)
        assert process.stdout is not None
        async with asyncio.timeout(40):
            assert b"listens on" in await process.stdout.readline()

    async def start_topology(self, host: str, name: str = "") -> None:
        await self.start(
            host,
            *("serve", "topology", "--listen", "0.0.0.0:52410", "--heartbeat-seconds", "0.5"),
            *(("--cluster-name", name) if name else ()),
        )

    async def start_node(self, host: str, name: str, port: int = 52420, *more: str) -> None:
        folder = str(self.folder / name)
        listen = f"0.0.0.0:{port}"
        await self.start(
            host, "node", "--listen", listen, "--name", name, "--data-dir", folder, *more
        )

    async def ask(self, host: str, *arguments: str) -> tuple[int, Any, str]:
        """Return how a command ended: its code, its JSON or None, and what it remarked."""
        process = await self.spawn(host, *arguments, "--json")
        async with asyncio.timeout(40):
            out, err = await process.communicate()
        assert process.returncode is not None
        return process.returncode, json.loads(out) if out else None, err.decode()

    async def names(self, host: str, *arguments: str) -> set[str]:
        _, document, _ = await self.ask(host, "nodes", *arguments)
        return {node["name"] for node in document["nodes"]} if document else set()

    async def stop(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        for process in self.processes:
            try:
                async with asyncio.timeout(15):
                    await process.communicate()
            except TimeoutError:
                process.kill()
                await process.wait()


@pytest.fixture
def built(tmp_path: Path) -> Iterator[Lan]:
    lan = Lan(tmp_path)
    try:
        lan.build()
        yield lan
    finally:
        lan.remove()


@pytest.fixture
async def lan(built: Lan) -> AsyncIterator[Lan]:
    yield built
    await built.stop()


async def test_nodes_and_clients_find_the_only_cluster(lan: Lan) -> None:
    # The node is first: it looks until the cluster is there.
    node = asyncio.create_task(lan.start_node("guest", "ada"))
    await lan.start_topology("red")
    await node
    await lan.start_node("blue", "bob", 52420)
    # Two nodes behind one address, on ports of their own.
    await lan.start_node("blue", "cyd", 52421)

    async def linked() -> bool:
        _, document, _ = await lan.ask("guest", "links")
        return document is not None and len(document["links"]) == 6

    async def complete() -> bool:
        return await lan.names("guest") == {"ada", "bob", "cyd"}

    await eventually(complete, 40)
    # Each reaches each: bob and cyd at one address, told apart by their ports.
    await eventually(linked, 40)


async def test_names_keep_two_clusters_apart(lan: Lan) -> None:
    await lan.start_topology("red", "red")
    await lan.start_topology("blue", "blue")
    code, _, said = await lan.ask("guest", "nodes")
    assert code == 1
    error = json.loads(said.splitlines()[-1])["error"]
    assert error["reason"] == "CLUSTER_AMBIGUOUS"
    assert error["metadata"]["found"] == "blue at 10.66.7.2:52410, red at 10.66.7.1:52410"
    # A node refuses likewise, and ends.
    process = await lan.spawn("guest", "node", "--listen", "0.0.0.0:52420")
    async with asyncio.timeout(40):
        _, err = await process.communicate()
    assert process.returncode == 1
    assert "blue at 10.66.7.2:52410, red at 10.66.7.1:52410" in err.decode()

    await lan.start_node("guest", "ada", 52420, "--cluster-name", "blue")
    assert await lan.names("guest", "--cluster-name", "blue") == {"ada"}
    assert await lan.names("guest", "--cluster-name", "red") == set()
    code, _, said = await lan.ask("guest", "nodes", "--cluster-name", "green")
    assert code == 1
    assert "No cluster named green" in said


async def test_where_multicast_does_not_go_addresses_do(lan: Lan) -> None:
    await lan.start_topology("red")
    # As between a container and the LAN of its host.
    for host in HOSTS:
        lan.ip("switch", f"link set p-{host} type bridge_slave mcast_flood off")
    code, _, said = await lan.ask("guest", "nodes")
    assert (code, "CLUSTER_NOT_FOUND" in said) == (1, True)
    await lan.start_node("guest", "ada", 52420, "--join", address("red"))
    assert await lan.names("guest", "--cluster", address("red")) == {"ada"}
    (lan.folder / "guest").mkdir(exist_ok=True)
    (lan.folder / "guest" / "join").write_text(f"{address('red')}\n")
    assert await lan.names("guest") == {"ada"}


async def test_doctor_names_the_way_that_a_firewall_bars(lan: Lan) -> None:
    await lan.start_topology("red")
    await lan.start_node("guest", "ada")
    await lan.start_node("blue", "bob")

    async def healthy() -> bool:
        code, document, _ = await lan.ask("red", "doctor")
        assert (code == 0) == document["healthy"]
        return code == 0 and document["node_count"] == 2

    await eventually(healthy, 40)
    # ada's own calls to bob get nowhere; her answers to his calls do.
    barred = f"to {address('blue')} ipproto tcp dport 52420 blackhole"
    lan.ip("guest", f"rule add {barred}")

    async def one_way() -> bool:
        code, document, _ = await lan.ask("red", "doctor")
        found = {finding["code"]: finding for finding in document["findings"]}
        return code == 1 and "ada does not reach bob" in found.get("one_way", {"text": ""})["text"]

    await eventually(one_way, 40)
    lan.ip("guest", f"rule del {barred}")
    await eventually(healthy, 40)
