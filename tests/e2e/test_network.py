"""What the topology lists on a network of four hosts, while that is cut, slowed and mended.

The hosts are network namespaces of this machine, so the tests take root on Linux. Each test leaves
the network as it found it.
"""

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from services.common.addresses import HostPort
from shardring.topology.v1 import topology_pb2 as pb
from tests.contract.topology_lab import Client
from tests.e2e.network import (
    BRIDGE_ADDRESS,
    FORBIDDEN,
    HOSTS,
    LAN_MBIT,
    PORT,
    RING,
    SLOWED_TUNNEL_MS,
    TOPOLOGY_PORT,
    TUNNEL,
    TUNNEL_MBIT,
    TUNNEL_MS,
    Network,
    lan_address,
    missing,
    ring_address,
    tunnel_address,
)

pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=f"no hosts to test with: {missing()}"),
    pytest.mark.asyncio(loop_scope="module"),
]

HEARTBEAT_SECONDS = 0.6
LEASE_SECONDS = 3 * HEARTBEAT_SECONDS
# What waiting for a process on a busy machine may add to any of the times below.
SLACK_SECONDS = 4.0
# From the last answer: until the next probe, then three that get none for a second each.
LOST_SECONDS = 2 * HEARTBEAT_SECONDS + 3 * (1.0 + HEARTBEAT_SECONDS)
# Until a silent address is asked again, and answers at once.
BACK_SECONDS = 5 * HEARTBEAT_SECONDS + 1.0
# How long a host's cable keeps coming and going.
FLAP_SECONDS = 60.0

Key = tuple[str, str, str]


def ways(host: str, other: str) -> set[Key]:
    """The links that must be listed from one host to another."""
    found = set()
    if (host, other) != FORBIDDEN:
        found.add((host, other, lan_address(other)))
    if (host, other) in RING or (other, host) in RING:
        found.add((host, other, ring_address(other, host)))
    if {host, other} == set(TUNNEL):
        found.add((host, other, tunnel_address(other)))
    return found


def all_ways(*hosts: str) -> set[Key]:
    """The links that must be listed among these hosts; without any, among all."""
    among = hosts or HOSTS
    return {key for a in among for b in among if a != b for key in ways(a, b)}


class View:
    """A topology as listed, by the names of the hosts."""

    def __init__(self, topology: pb.Topology) -> None:
        self.names = {node.node_id: node.name for node in topology.nodes}
        self.topology = topology
        self.links: dict[Key, pb.Link] = {
            (
                self.names[link.source_node_id],
                self.names[link.sink_node_id],
                link.sink_address,
            ): link
            for link in topology.links
        }

    def throughput(self, key: Key) -> float:
        """Return the megabytes per second of a link, 0 where it is not measured."""
        return self.links[key].throughput_bytes_per_second / 1e6

    def round_trip_ms(self, key: Key) -> float:
        return self.links[key].round_trip_median.ToNanoseconds() / 1e6


class Cluster:
    """The processes on the network: a topology service and a node on each host."""

    def __init__(self, network: Network, folder: Path) -> None:
        self.network = network
        self.client = Client(HostPort(network.service, TOPOLOGY_PORT))
        self._folder = folder
        self._processes: dict[str, asyncio.subprocess.Process] = {}

    async def start_topology(self) -> None:
        options = ("--listen", f"0.0.0.0:{TOPOLOGY_PORT}", "--log-level", "warning", "--insecure")
        beat = ("--heartbeat-seconds", str(HEARTBEAT_SECONDS))
        await self._start("switch", "services.topology", *options, *beat)

    async def start_node(self, host: str) -> None:
        options = ("--topology", self.network.topology, "--name", host, "--port", str(PORT))
        folder = ("--data-dir", str(self._folder / host))
        await self._start(host, "tests.e2e.network_node", *options, *folder)

    async def start_whole_node(self, host: str) -> None:
        """Start `shardring node` itself."""
        services = ("--topology", self.network.topology, "--downloads", "10.66.0.254:1")
        options = (
            "--name",
            host,
            "--listen",
            f"0.0.0.0:{PORT}",
            "--log-level",
            "error",
            "--insecure",
        )
        folder = ("--data-dir", str(self._folder / host))
        await self._start(host, "services.cli", "node", *services, *options, *folder)

    async def _start(self, host: str, module: str, *options: str) -> None:
        command = self.network.command(host, sys.executable, "-m", module, *options)
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        self._processes[host] = process
        assert process.stdout is not None
        async with asyncio.timeout(30):
            assert b"listens on" in await process.stdout.readline()

    async def kill(self, host: str) -> None:
        """Kill a host's process, so that it cannot say goodbye."""
        process = self._processes.pop(host)
        process.kill()
        await process.wait()

    async def stop(self) -> None:
        await self.client.remote.close()
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            async with asyncio.timeout(20):
                await process.wait()

    async def view(self) -> View:
        return View((await self.client.get()).topology)

    async def until(self, seconds: float, condition: Callable[[View], bool]) -> View:
        """Return the first view that meets the condition; fail when none does in time."""
        until = time.monotonic() + seconds + SLACK_SECONDS
        while True:
            view = await self.view()
            if condition(view):
                return view
            if time.monotonic() > until:
                raise AssertionError(f"not so in {seconds} s: {sorted(view.links)}")
            await asyncio.sleep(0.05)

    async def listed(self, seconds: float, expected: set[Key]) -> View:
        """Return the view once it lists exactly these links; fail when it does not in time."""
        until = time.monotonic() + seconds + SLACK_SECONDS
        while (view := await self.view()).links.keys() != expected:
            if time.monotonic() > until:
                more, less = (
                    sorted(view.links.keys() - expected),
                    sorted(expected - view.links.keys()),
                )
                raise AssertionError(f"after {seconds} s listed beside: {more}, not listed: {less}")
            await asyncio.sleep(0.05)
        return view


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    network = Network()
    try:
        await network.build()
        cluster = Cluster(network, tmp_path_factory.mktemp("hosts"))
        try:
            await cluster.start_topology()
            await asyncio.gather(*map(cluster.start_node, HOSTS))
            yield cluster
        finally:
            await cluster.stop()
    finally:
        await network.remove()


@contextlib.asynccontextmanager
async def steady(cluster: Cluster, *hosts: str) -> AsyncIterator[None]:
    """Follow every change, and fail when a link among these hosts goes for even a moment."""
    expected = all_ways(*hosts)
    lost: list[tuple[Key, ...]] = []

    async def follow() -> None:
        names = (await cluster.view()).names
        async with cluster.client.watch(seconds=3 * FLAP_SECONDS) as responses:
            async for response in responses:
                change = response.change
                names |= {node.node_id: node.name for node in change.updated_nodes}
                gone = {names[node_id] for node_id in change.removed_node_ids} & set(hosts)
                listed = {
                    (names[k.source_node_id], names[k.sink_node_id], k.sink_address)
                    for k in (*change.links, *response.snapshot.links)
                }
                told = {names[source] for source in change.relinked_source_node_ids}
                if response.HasField("snapshot"):
                    told = set(hosts)
                missed = {key for key in expected if key[0] in told or key[0] in gone} - listed
                if missed:
                    lost.append(tuple(sorted(missed)))

    following = asyncio.create_task(follow())
    try:
        yield
    finally:
        following.cancel()
        await asyncio.wait([following])
    assert lost == []
    assert following.cancelled()


async def both(*tasks: Awaitable[object]) -> None:
    await asyncio.gather(*tasks)


async def test_exactly_the_links_that_work_are_listed_and_measured(cluster: Cluster) -> None:
    def measured(view: View) -> bool:
        return view.links.keys() == all_ways() and all(map(view.throughput, view.links))

    view = await cluster.until(30, measured)
    assert len(view.links) == 11 + 8 + 2
    assert not view.topology.misdirections
    for (source, sink, address), link in view.links.items():
        tunnel = address == tunnel_address(sink) if sink in TUNNEL else False
        kind = pb.INTERFACE_KIND_OVERLAY if tunnel else pb.INTERFACE_KIND_VIRTUAL
        assert link.kind == kind
        assert link.sink_port == PORT
        on_ring = address.startswith("169.254")
        expected = "wg0" if tunnel else f"tb-{sink}" if on_ring else "lan0"
        assert link.source_interface == expected
        assert 0 < link.round_trip.ToNanoseconds() <= link.round_trip_median.ToNanoseconds()
        assert 0 < link.throughput_age.ToSeconds() < 60
        # One host may not call the other, and no other way joins the two.
        assert link.one_way == ((sink, source) == FORBIDDEN)
    # Every host has the bridge and says so, and nobody takes it for a link.
    assert all(
        BRIDGE_ADDRESS in [endpoint.address for endpoint in node.endpoints]
        for node in view.topology.nodes
    )
    # The slow wire is the slowest in every respect, and a ring cable beats the LAN.
    for host, other in (*RING, *((b, a) for a, b in RING)):
        ring = view.throughput((host, other, ring_address(other, host)))
        assert ring > 2 * view.throughput((host, other, lan_address(other)))
    for host, other in (TUNNEL, TUNNEL[::-1]):
        slow, lan = (host, other, tunnel_address(other)), (host, other, lan_address(other))
        assert view.throughput(slow) < view.throughput(lan) / 2
        assert view.round_trip_ms(slow) > 2 * TUNNEL_MS > view.round_trip_ms(lan)
        assert TUNNEL_MBIT / 8 / 2 < view.throughput(slow) < TUNNEL_MBIT / 8 * 1.5
        assert view.throughput(lan) < LAN_MBIT / 8 * 1.2


async def test_a_cut_cable_and_a_slowed_tunnel_show_and_mend(cluster: Cluster) -> None:
    await cluster.listed(BACK_SECONDS, all_ways())
    host, other = RING[0]
    cut = {(host, other, ring_address(other, host)), (other, host, ring_address(host, other))}
    tunnel = (TUNNEL[0], TUNNEL[1], tunnel_address(TUNNEL[1]))
    async with steady(cluster, "cyd", "dan"):
        cluster.network.set_ring(host, other, plugged=False)
        await cluster.network.set_tunnel(SLOWED_TUNNEL_MS, TUNNEL_MBIT)

        def slow(view: View) -> bool:
            return view.round_trip_ms(tunnel) > 2 * SLOWED_TUNNEL_MS

        await both(
            cluster.listed(LOST_SECONDS, all_ways() - cut),
            # Once most of the last eight probes saw it.
            cluster.until(5 * 2 * HEARTBEAT_SECONDS + 5 * HEARTBEAT_SECONDS, slow),
        )
        cluster.network.set_ring(host, other, plugged=True)
        await cluster.network.set_tunnel(TUNNEL_MS, TUNNEL_MBIT)
        await cluster.listed(BACK_SECONDS, all_ways())


async def test_two_halves_that_cannot_reach_each_other_keep_what_is_theirs(
    cluster: Cluster,
) -> None:
    await cluster.listed(BACK_SECONDS, all_ways())
    halves = ("ada", "bob"), ("cyd", "dan")
    kept = all_ways(*halves[0]) | all_ways(*halves[1])
    async with steady(cluster, *halves[0]), steady(cluster, *halves[1]):
        cluster.network.set_parted(halves[0], parted=True)
        # All nodes stay: each half still reaches the service.
        view = await cluster.listed(LOST_SECONDS, kept)
        assert set(view.names.values()) == set(HOSTS)
        assert not any(link.one_way for link in view.links.values())
        cluster.network.set_parted(halves[0], parted=False)
        await cluster.listed(BACK_SECONDS, all_ways())


async def test_a_host_that_flaps_does_not_make_the_others_flap(cluster: Cluster) -> None:
    await cluster.listed(BACK_SECONDS, all_ways())
    async with steady(cluster, "ada", "bob", "cyd"):
        until = time.monotonic() + FLAP_SECONDS
        while time.monotonic() < until:
            cluster.network.set_lan("dan", plugged=False)
            await asyncio.sleep(0.7)
            cluster.network.set_lan("dan", plugged=True)
            await asyncio.sleep(0.5)
        await cluster.listed(BACK_SECONDS + LEASE_SECONDS, all_ways())


async def test_a_host_cut_off_from_the_service_goes_whole_and_comes_back(cluster: Cluster) -> None:
    await cluster.listed(BACK_SECONDS, all_ways())
    async with steady(cluster, "ada", "bob", "cyd"):
        dan = next(i for i, name in (await cluster.view()).names.items() if name == "dan")
        async with cluster.client.watch() as responses:
            await anext(responses)
            # Its ring cables still work: who is there is for the service to say.
            cluster.network.set_lan("dan", plugged=False)
            async with asyncio.timeout(LEASE_SECONDS + SLACK_SECONDS):
                async for response in responses:
                    if list(response.change.removed_node_ids) == [dan]:
                        break
        # With that revision all its links are gone, those over its ring cables as well.
        answer = await cluster.client.get()
        assert answer.revision == response.revision
        view = View(answer.topology)
        assert view.links.keys() == all_ways("ada", "bob", "cyd")
        assert set(view.names.values()) == {"ada", "bob", "cyd"}
        cluster.network.set_lan("dan", plugged=True)
        await cluster.listed(BACK_SECONDS + 2 * HEARTBEAT_SECONDS, all_ways())


async def test_a_killed_node_goes_and_its_next_run_takes_its_place(cluster: Cluster) -> None:
    before = await cluster.listed(BACK_SECONDS, all_ways())
    async with steady(cluster, "ada", "cyd", "dan"):
        await cluster.kill("bob")
        view = await cluster.until(LEASE_SECONDS, lambda view: "bob" not in view.names.values())
        assert view.links.keys() == all_ways("ada", "cyd", "dan")
        # The whole command, with runner and all, on the same disk.
        await cluster.start_whole_node("bob")
        view = await cluster.listed(BACK_SECONDS, all_ways())
        assert view.names == before.names


async def test_a_restarted_service_gathers_and_then_has_the_whole_picture(
    cluster: Cluster,
) -> None:
    before = await cluster.listed(BACK_SECONDS, all_ways())
    await cluster.kill("switch")
    await cluster.start_topology()
    began = time.monotonic()
    first = (await cluster.client.get()).topology
    assert first.gathering
    # One heartbeat, and what it takes agents to find that the service is back.
    view = await cluster.listed(HEARTBEAT_SECONDS, all_ways())
    assert view.names == before.names
    assert all(view.throughput(key) for key in before.links if before.throughput(key))
    settled = await cluster.until(LEASE_SECONDS, lambda view: not view.topology.gathering)
    assert settled.links.keys() == all_ways()
    assert time.monotonic() - began >= 0.9 * LEASE_SECONDS
