"""The node process: runner, topology agent and downloads worker behind one gRPC server.

The composition root of a node; the only code that knows all three.
"""

import asyncio
import contextlib
from dataclasses import dataclass
from pathlib import Path

from services.common.addresses import HostPort, parse_host_port
from services.common.channel import Remote
from services.common.errors import invalid_field
from services.common.logs import start_logging
from services.common.options import option
from services.common.server import announce, start_server, until_stopped
from services.common.telemetry import start_telemetry
from services.downloads.worker.worker import DownloadsWorker
from services.runner.bootstrap import build_runner
from services.topology.agent.agent import AgentOptions, TopologyAgent
from services.topology.agent.identity import held_identity
from services.topology.agent.report import MemoryRules
from services.topology.agent.rpc import identity_registration

TOPOLOGY_PORT = 52410
DOWNLOADS_PORT = 52412


@dataclass(frozen=True)
class NodeOptions:
    """How a node runs."""

    join: str = option(
        "127.0.0.1",
        "Host where the topology and downloads services run on their usual ports.",
        env="SHARDRING_JOIN",
    )
    topology: str = option("", "Address of topology, if not at --join.", env="SHARDRING_TOPOLOGY")
    downloads: str = option(
        "", "Address of downloads, if not at --join.", env="SHARDRING_DOWNLOADS"
    )
    listen: str = option(
        "127.0.0.1:52420",
        "Address and port to serve on; port 0 takes any free one. 0.0.0.0:52420 serves on, and "
        "advertises, every address of this machine.",
        env="SHARDRING_NODE_LISTEN",
    )
    name: str = option("", "Name shown to people. Empty: the host name.", env="SHARDRING_NAME")
    data_dir: str = option(
        "~/.shardring", "Folder that keeps this node's identity.", env="SHARDRING_DATA_DIR"
    )
    memory_gb: float = option(
        0.0,
        "Memory that shards may take in all, in GB (10^9 bytes). 0: what is free, less "
        "--headroom-gb.",
        env="SHARDRING_MEMORY_GB",
    )
    headroom_gb: float = option(
        1.0, "Free memory to leave alone, in GB.", env="SHARDRING_HEADROOM_GB"
    )
    lab: bool = option(
        False,
        "Count loopback addresses as links: all nodes are on this machine.",
        env="SHARDRING_LAB",
    )
    log_level: str = option(
        "info",
        "Least severity that is logged.",
        env="SHARDRING_LOG_LEVEL",
        choices=("debug", "info", "warning", "error"),
    )


async def run_node(options: NodeOptions) -> None:
    """Run a node until SIGTERM or SIGINT.

    Raises StartError when the data folder or the port belongs to another process, and
    ShardringError(INVALID_FIELD) for an option that makes no sense.
    """
    start_logging(options.log_level)
    listen = parse_host_port(options.listen)
    for name in ("memory_gb", "headroom_gb"):
        if not 0 <= getattr(options, name) <= 1e6:
            raise invalid_field(name, getattr(options, name), "0 to 1000000")
    topology = parse_host_port(options.topology or options.join, default_port=TOPOLOGY_PORT)
    downloads = parse_host_port(options.downloads or options.join, default_port=DOWNLOADS_PORT)
    stopped = asyncio.create_task(until_stopped(), name="until stopped")
    with held_identity(_data_folder(options)) as identity:
        start_telemetry("shardring-node", node_id=identity.node_id, node_name=options.name)
        remote = Remote("downloads", [downloads])
        runner, registrations = build_runner(identity.node_id, remote)
        server = await start_server(
            listen, [identity_registration(identity.node_id), *registrations]
        )
        address = HostPort(listen.host, server.port)
        memory = MemoryRules(
            headroom_bytes=round(options.headroom_gb * 1e9),
            memory_bytes=round(options.memory_gb * 1e9),
            reserved_bytes=runner.reserved_bytes,
            loaded_bytes=runner.loaded_bytes,
        )
        agent = TopologyAgent(
            AgentOptions(topology, identity, address, options.name, options.lab, memory)
        )
        worker = DownloadsWorker(identity.node_id, remote)
        announce("node", address)
        registered = asyncio.create_task(agent.registered.wait(), name="registered")
        running = [
            asyncio.create_task(agent.run(), name="topology agent"),
            asyncio.create_task(worker.run(), name="downloads worker"),
        ]
        try:
            await _first(registered, stopped, *running)
            await server.set_serving(registered.done())
            await _first(stopped, *running)
        finally:
            await server.set_serving(False)
            # In this order: siblings hear of the runner's end while the server still answers.
            await runner.close("is stopping")
            for task in (*running, registered, stopped):
                task.cancel()
            await asyncio.wait([*running, registered, stopped])
            await server.stop()
            await remote.close()
        for task in running:
            with contextlib.suppress(asyncio.CancelledError):
                task.result()


def _data_folder(options: NodeOptions) -> Path:
    return Path(options.data_dir).expanduser()


async def _first(*tasks: "asyncio.Task[None] | asyncio.Task[bool]") -> None:
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
