"""The node process: runner, topology agent and downloads worker behind one gRPC server.

The composition root of a node; the only code that knows all three.
"""

import asyncio
import contextlib
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from services.cli.joining import (
    DOWNLOADS_PORT,
    LOCAL,
    TOPOLOGY_PORT,
    Services,
    found_in_time,
    told,
)
from services.common.addresses import HostPort, parse_host_port
from services.common.channel import Remote
from services.common.errors import invalid_field
from services.common.logs import start_logging
from services.common.metrics import start_metrics
from services.common.options import option
from services.common.security import Security, ServerOptions, use_security
from services.common.server import (
    ListenError,
    StartError,
    announce,
    check_listen,
    start_server,
    until_stopped,
)
from services.common.telemetry import start_telemetry
from services.downloads.worker.node_hub import MAX_PORT, NodeHub
from services.downloads.worker.options import MAX_PARALLEL_FILES, CacheOptions
from services.downloads.worker.ways import Way
from services.downloads.worker.worker import DownloadsWorker
from services.runner.adapters.probe import probe_cuts
from services.runner.bootstrap import build_calibrator, build_runner
from services.runner.domain.calibration import Calibration
from services.runner.metrics import observe_instances
from services.topology.agent.agent import AgentOptions, TopologyAgent
from services.topology.agent.bursts import BurstGate
from services.topology.agent.identity import held_identity
from services.topology.agent.report import MemoryRules, memory_left
from services.topology.agent.rpc import identity_registration
from services.topology.domain.addresses import IpNetwork, network_of, parsed
from services.topology.domain.model import Link, Speed


@dataclass(frozen=True)
class NodeOptions(ServerOptions):
    """How a node runs."""

    join: str = option(
        "",
        "Host where the topology and downloads services run on their usual ports. If not named "
        "here nor in the file `join` of the data folder: this machine, or else, for a node that "
        "listens on other than loopback, the one found on the LAN.",
        env="SHARDRING_JOIN",
    )
    cluster_name: str = option(
        "", "Which cluster to join, of those found on the LAN.", env="SHARDRING_CLUSTER_NAME"
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
    hub_port: int = option(
        0,
        "Port where other nodes get models from this node's disk, on the host of --listen. 0: the "
        "tenth after the port of --listen, or any free one when that is taken.",
        env="SHARDRING_HUB_PORT",
    )
    ring_network: tuple[str, ...] = option(
        (),
        "Network, such as 10.9.0.0/24, over which rings are made and models come from other nodes; "
        "addresses in others are for calls alone. May be given several times. If never: all.",
        env="SHARDRING_RING_NETWORK",
    )
    name: str = option("", "Name shown to people. Empty: the host name.", env="SHARDRING_NAME")
    data_dir: str = option(
        "~/.shardring",
        "Folder that keeps this node's identity, and may hold the file `join`.",
        env="SHARDRING_DATA_DIR",
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
    parallel_files: int = option(
        4,
        "Files of models that are fetched at a time, by all downloads together.",
        env="SHARDRING_PARALLEL_FILES",
    )
    download_mb_per_second: float = option(
        0.0,
        "Most that all downloads together receive, in MB (10^6 bytes) per second. 0: no limit.",
        env="SHARDRING_DOWNLOAD_MB_PER_SECOND",
    )
    calibrate: bool = option(
        True,
        "Measure once, while no instance runs, how fast this machine computes, for placements by "
        "speed.",
        env="SHARDRING_CALIBRATE",
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
    security = use_security(options)
    listen = parse_host_port(options.listen)
    for name in ("memory_gb", "headroom_gb", "download_mb_per_second"):
        if not 0 <= getattr(options, name) <= 1e6:
            raise invalid_field(name, getattr(options, name), "0 to 1000000")
    if not 1 <= options.parallel_files <= MAX_PARALLEL_FILES:
        expected = f"1 to {MAX_PARALLEL_FILES}"
        raise invalid_field("parallel_files", options.parallel_files, expected)
    if not 0 <= options.hub_port <= MAX_PORT:
        raise invalid_field("hub_port", options.hub_port, f"0 to {MAX_PORT}")
    networks = ring_networks(options.ring_network)
    check_listen(listen, security)
    named = named_services(options)
    stopped = asyncio.create_task(until_stopped(), name="until stopped")
    with held_identity(_data_folder(options)) as identity:
        check_certificate(security, identity.node_id)
        looking = asyncio.create_task(
            _located(named, options, listen), name="looking for a cluster"
        )
        await _first(looking, stopped)
        if stopped.done():
            looking.cancel()
            await asyncio.wait([looking])
            return
        topology, downloads = looking.result()
        described = {
            "node_id": identity.node_id,
            "node_name": options.name or socket.gethostname(),
        }
        start_telemetry("shardring-node", **described)
        # Both tell the last when the process ends.
        measured = start_metrics("shardring-node", **described) is not None
        remote = Remote("downloads", [downloads])
        runner, registrations = build_runner(identity.node_id, remote, listen.host)
        if measured:
            observe_instances(runner.list)
        gate = BurstGate(identity.node_id, runner.generating)
        server = await start_server(
            listen, [identity_registration(identity.node_id, gate), *registrations]
        )
        address = HostPort(listen.host, server.port)
        memory = MemoryRules(
            headroom_bytes=round(options.headroom_gb * 1e9),
            memory_bytes=round(options.memory_gb * 1e9),
            reserved_bytes=runner.reserved_bytes,
            loaded_bytes=runner.loaded_bytes,
        )
        runner.memory_left = partial(memory_left, memory)
        calibrator = build_calibrator(runner, _data_folder(options), identity.fingerprint)
        await calibrator.recall()
        agent = TopologyAgent(
            AgentOptions(
                topology,
                identity,
                address,
                options.name,
                options.lab,
                networks,
                memory,
                gate,
                lambda: speed_of(calibrator.calibration),
            )
        )
        cache = CacheOptions(
            parallel_files=options.parallel_files,
            bytes_per_second=options.download_mb_per_second * 1e6,
        )
        hub = NodeHub(cache.cache_dir)
        try:
            hub_port = await hub.start(listen, options.hub_port)
        except ListenError:
            await server.stop()
            raise
        worker = DownloadsWorker(
            identity.node_id,
            remote,
            cache,
            ways=lambda node_id: ways_to(node_id, agent.links()),
            hub_port=hub_port,
            in_use=runner.models_in_use,
            probe=probe_cuts,
        )
        announce("node", address)
        registered = asyncio.create_task(agent.registered.wait(), name="registered")
        running = [
            asyncio.create_task(agent.run(), name="topology agent"),
            asyncio.create_task(_work(worker, agent), name="downloads worker"),
        ]
        calibrating: asyncio.Task[None] | None = None
        try:
            await _first(registered, stopped, *running)
            await server.set_serving(registered.done())
            if options.calibrate:
                calibrating = asyncio.create_task(calibrator.run(), name="calibration")
            await _first(stopped, *running)
        finally:
            if calibrating is not None:
                calibrating.cancel()
                await asyncio.wait([calibrating])
            await server.set_serving(False)
            # In this order: siblings hear of the runner's end while the server still answers.
            await runner.close("is stopping")
            for task in (*running, registered, stopped):
                task.cancel()
            await asyncio.wait([*running, registered, stopped])
            await hub.stop()
            await server.stop()
            await remote.close()
        for task in running:
            with contextlib.suppress(asyncio.CancelledError):
                task.result()


async def _work(worker: DownloadsWorker, agent: TopologyAgent) -> None:
    """Attach to downloads once topology has taken this node: a second machine with its id must
    not take the first one's place there."""
    await agent.registered.wait()
    await worker.run()


def check_certificate(security: Security, node_id: str) -> None:
    """Raise StartError when this process has a certificate, and it is not this node's."""
    if security.tls is None or security.tls.node_ids == (node_id,):
        return
    named = " and ".join(security.tls.node_ids) or "no node"
    raise StartError(
        f"{security.tls.cert} names {named}, and this is node {node_id}. Issue a certificate for "
        f"it where the cluster's CA is kept: shardring pki issue --node {node_id}"
    )


def ring_networks(texts: Iterable[str]) -> tuple[IpNetwork, ...]:
    """Return the networks over which rings may be made. Raises INVALID_FIELD for what is none."""
    networks = []
    for text in texts:
        network = network_of(text)
        if network is None:
            raise invalid_field("ring_network", text, "a network, such as 10.9.0.0/24")
        networks.append(network)
    return tuple(networks)


def speed_of(calibration: Calibration | None) -> Speed:
    """Return what topology is told of a calibration, and of none."""
    if calibration is None:
        return Speed()
    return Speed(calibration.weight_bytes_per_second, calibration.multiply_adds_per_second)


def ways_to(node_id: str, links: Iterable[Link]) -> list[Way]:
    """Return the verified ways to another node, the one with the greatest measured throughput
    first; then those not measured yet, the one with the shortest round trip first."""

    def rank(link: Link) -> tuple[int, int]:
        return (-link.throughput.bytes_per_second if link.throughput else 0, link.round_trip_ns)

    return [
        Way(link.sink_address, link.throughput.bytes_per_second if link.throughput else None)
        for link in sorted(links, key=rank)
        if link.sink == node_id
    ]


def named_services(options: NodeOptions) -> tuple[HostPort | None, HostPort | None]:
    """Return where topology and downloads are, as far as the options or the join file say."""
    services = told(options.join, options.data_dir)
    topology = services.topology if services else None
    if options.topology:
        topology = parse_host_port(options.topology, default_port=TOPOLOGY_PORT)
        services = services or Services.at(topology.host, "as told")
    downloads = services.downloads if services else None
    if options.downloads:
        downloads = parse_host_port(options.downloads, default_port=DOWNLOADS_PORT)
    return topology, downloads


async def _located(
    named: tuple[HostPort | None, HostPort | None], options: NodeOptions, listen: HostPort
) -> tuple[HostPort, HostPort]:
    """Return where topology and downloads are; looks on the LAN for as long as it takes.

    Raises CLUSTER_AMBIGUOUS when more than one cluster could be meant.
    """
    topology, downloads = named
    if topology is None:
        services = Services.at(LOCAL, "on this machine")
        if not options.lab and not _is_loopback(listen.host):
            services = await found_in_time(options.cluster_name)
        topology, downloads = services.topology, downloads or services.downloads
    assert downloads is not None  # named or found, topology brings it along
    return topology, downloads


def _is_loopback(host: str) -> bool:
    address = parsed(host)
    return host == "localhost" if address is None else address.is_loopback


def _data_folder(options: NodeOptions) -> Path:
    return Path(options.data_dir).expanduser()


async def _first(*tasks: "asyncio.Task[Any]") -> None:
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
