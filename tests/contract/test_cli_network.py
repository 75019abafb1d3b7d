"""`shardring doctor`, and `links` and `nodes` as they go on."""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from shardring.topology.v1 import topology_pb2
from tests.contract.cli_lab import FakeCluster, fake_cluster


@pytest.fixture
async def cluster() -> AsyncIterator[FakeCluster]:
    async with fake_cluster("ada", "bob") as cluster:
        yield cluster


def link(cluster: FakeCluster, source: str, sink: str) -> None:
    made = cluster.topology.topology.links.add(
        source_node_id=cluster.nodes[source].node.node_id,
        sink_node_id=cluster.nodes[sink].node.node_id,
        sink_address="127.0.0.1",
        kind=topology_pb2.INTERFACE_KIND_ETHERNET,
        throughput_bytes_per_second=117_500_000,
    )
    made.round_trip.FromMicroseconds(420)
    made.throughput_age.FromSeconds(3)


async def line_of(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    async with asyncio.timeout(30):
        return (await process.stdout.readline()).decode()


async def test_a_healthy_cluster_ends_with_0(cluster: FakeCluster) -> None:
    link(cluster, "ada", "bob")
    link(cluster, "bob", "ada")
    run = await cluster.run("doctor")
    assert run.out == (
        "2 nodes, 2 links: nothing wrong with this cluster's network. "
        "Speeds were measured 3.0 s ago.\n"
    )
    assert (run.code, run.err) == (0, "")
    document = (await cluster.run("doctor", "--json")).document
    assert document == {"healthy": True, "node_count": 2, "link_count": 2, "findings": []}


async def test_what_is_wrong_is_said_and_ends_with_1(cluster: FakeCluster) -> None:
    link(cluster, "ada", "bob")
    await cluster.nodes["bob"].server.stop()
    run = await cluster.run("doctor")
    assert run.code == 1
    assert "This machine reaches bob at none of its addresses (127.0.0.1)" in run.out
    assert "ECONNREFUSED" in run.out
    assert "bob does not reach ada at any of 127.0.0.1" in run.out
    document = (await cluster.run("doctor", "--json")).document
    assert document["healthy"] is False
    assert {found["code"] for found in document["findings"]} == {
        "unreachable_from_here",
        "one_way",
        "apart",
    }
    assert all(found["remedy"] for found in document["findings"])


async def test_without_a_topology_service_doctor_says_that(cluster: FakeCluster) -> None:
    run = await cluster.run("doctor", "--topology", "127.0.0.1:1")
    assert run.code == 1
    assert run.err.startswith("Cannot reach topology at 127.0.0.1:1")


async def test_links_are_a_table_and_a_matrix(cluster: FakeCluster) -> None:
    link(cluster, "ada", "bob")
    run = await cluster.run("links")
    table, matrix = run.out.split("\n\n")
    assert table.splitlines()[0].split()[:3] == ["FROM", "TO", "ADDRESS"]
    assert "940 Mbit/s" in table
    assert [" ".join(line.split()) for line in matrix.splitlines()] == [
        "FROM \\ TO ada bob",
        "ada 940 Mbit/s",
        "bob -",
    ]


async def test_links_are_followed_as_text_and_as_json(cluster: FakeCluster) -> None:
    for arguments in (["links", "--watch"], ["links", "--watch", "--json"]):
        del cluster.topology.topology.links[:]
        async with cluster.running(*arguments) as process:
            first = await line_of(process)
            link(cluster, "ada", "bob")
            cluster.topology.changed.put_nowait(None)
            if "--json" in arguments:
                assert json.loads(first)["links"] == []
                (shown,) = json.loads(await line_of(process))["links"]
                assert shown["throughput_bytes_per_second"] == "117500000"
            else:
                while "940 Mbit/s" not in await line_of(process):
                    pass
            process.terminate()
            async with asyncio.timeout(30):
                assert await process.wait() == 143


async def test_nodes_are_followed(cluster: FakeCluster) -> None:
    async with cluster.running("nodes", "--watch", "--json") as process:
        names = [node["name"] for node in json.loads(await line_of(process))["nodes"]]
        assert names == ["ada", "bob"]
        del cluster.topology.topology.nodes[0]
        cluster.topology.changed.put_nowait(None)
        assert [node["name"] for node in json.loads(await line_of(process))["nodes"]] == ["bob"]


async def test_a_watch_that_never_began_is_an_error(cluster: FakeCluster) -> None:
    run = await cluster.run("nodes", "--watch", "--topology", "127.0.0.1:1")
    assert run.code == 1
    assert run.err.startswith("Cannot reach topology")
