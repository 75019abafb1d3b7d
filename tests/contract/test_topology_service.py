"""TopologyService of a real process, as any client sees it."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.errors import Reason, ShardringError
from shardring.common.v1 import common_pb2
from shardring.topology.v1 import topology_pb2
from shardring.topology.v1 import topology_service_pb2 as pb
from tests.contract.topology_lab import Client, eventually, started, topology


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    # Leases that last as long as a test: these nodes report only once.
    async with topology("--heartbeat-seconds", "30") as (_, client):
        yield client


def node(node_id: str, *, port: int = 1, start: int = 1_000) -> topology_pb2.Node:
    message = topology_pb2.Node(
        node_id=node_id,
        name=f"name-{node_id}",
        endpoints=[common_pb2.Endpoint(address="127.0.0.1", port=port)],
        memory_total_bytes=2**30,
        memory_available_bytes=2**29,
    )
    message.start_time.seconds = start
    return message


def link(source: str, sink: str, address: str = "127.0.0.1") -> topology_pb2.Link:
    return topology_pb2.Link(source_node_id=source, sink_node_id=sink, sink_address=address)


async def test_reports_make_the_topology(client: Client) -> None:
    response = await client.report_node(node("b"))
    assert (response.lease.seconds, response.heartbeat_interval.seconds) == (90, 30)
    await client.report_node(node("a"))
    revision = (await client.report_links("a", link("a", "b"), link("a", "later"))).revision
    assert revision == response.revision + 2

    answer = await client.get()
    assert answer.revision == revision
    assert [n.node_id for n in answer.topology.nodes] == ["a", "b"]
    assert answer.topology.nodes[0].HasField("last_report_time")
    assert [(k.source_node_id, k.sink_node_id) for k in answer.topology.links] == [("a", "b")]
    assert answer.topology.gathering

    unchanged = await client.get(revision)
    assert unchanged.unchanged
    assert not unchanged.HasField("topology")
    assert not (await client.get(revision - 1)).unchanged


async def test_a_watch_is_a_snapshot_and_changes_and_resumes(client: Client) -> None:
    await client.report_node(node("a"))
    async with client.watch() as responses:
        first = await anext(responses)
        assert [n.node_id for n in first.snapshot.nodes] == ["a"]
        await client.report_node(node("b"))
        await client.report_links("a", link("a", "b"))
        await client.remove("b")
        second, third, fourth = [await anext(responses) for _ in range(3)]
    assert [n.node_id for n in second.change.updated_nodes] == ["b"]
    assert list(third.change.relinked_source_node_ids) == ["a"]
    assert [k.sink_node_id for k in third.change.links] == ["b"]
    assert list(fourth.change.removed_node_ids) == ["b"]
    assert [r.revision for r in (second, third, fourth)] == [first.revision + n for n in (1, 2, 3)]

    async with client.watch(after_revision=second.revision) as responses:
        assert [await anext(responses), await anext(responses)] == [third, fourth]
        await client.report_node(node("c"))
        assert [n.node_id for n in (await anext(responses)).change.updated_nodes] == ["c"]


async def test_a_watch_without_links_tells_of_nodes_alone(client: Client) -> None:
    await client.report_node(node("a"))
    await client.report_node(node("b"))
    await client.report_links("a", link("a", "b"))
    request = pb.WatchTopologyRequest(without_links=True)
    watch = client.remote.stream(client.stub.WatchTopology, request, timeout=30)
    async with aclosing(watch) as responses:
        first = await anext(responses)
        assert [n.node_id for n in first.snapshot.nodes] == ["a", "b"]
        assert not first.snapshot.links
        # Of links alone nothing is told; of nodes what came together, as one change.
        await client.report_links("b", link("b", "a"))
        revision = (await client.report_node(node("c"))).revision
        gone, nodes = set[str](), set[str]()
        while gone != {"b"} or nodes != {"c"}:
            if not gone:
                revision = (await client.remove("b")).revision
            response = await anext(responses)
            assert not response.change.links
            assert not response.change.relinked_source_node_ids
            nodes |= {n.node_id for n in response.change.updated_nodes}
            gone |= {*response.change.removed_node_ids}
        assert response.revision == revision
    request.after_revision = first.revision
    watch = client.remote.stream(client.stub.WatchTopology, request, timeout=30)
    async with aclosing(watch) as responses:
        response = await anext(responses)
        assert [n.node_id for n in response.change.updated_nodes] == ["c"]
        assert list(response.change.removed_node_ids) == ["b"]
        assert response.revision == revision


async def test_links_are_asked_for_until_they_are_reported(client: Client) -> None:
    assert (await client.report_node(node("a"))).links_wanted
    await client.report_links("a")
    assert not (await client.report_node(node("a"))).links_wanted
    assert (await client.report_node(node("a", start=2_000))).links_wanted


@pytest.mark.parametrize("offset", [-1, 1])
async def test_a_revision_that_is_not_held_is_out_of_range(client: Client, offset: int) -> None:
    revision = (await client.get()).revision
    with pytest.raises(ShardringError) as caught:
        async with client.watch(after_revision=revision + offset) as responses:
            await anext(responses)
    assert caught.value.reason is Reason.REVISION_COMPACTED
    assert isinstance(caught.value.__cause__, grpc.aio.AioRpcError)
    assert caught.value.__cause__.code() is grpc.StatusCode.OUT_OF_RANGE


async def test_bad_reports_are_refused_and_change_nothing(client: Client) -> None:
    await client.report_node(node("a"))
    await client.report_node(node("b"))
    revision = (await client.report_links("a", link("a", "b"))).revision
    negative = node("c")
    negative.memory_available_bytes = -1
    late = link("a", "b")
    late.round_trip.seconds = -1
    absurd, lost = link("a", "b"), link("a", "b")
    too_fast = node("c", port=1)
    too_fast.weight_bytes_per_second = 2**62
    absurd.throughput_bytes_per_second = -1
    lost.sink_port = 65_536
    for call, field in (
        (client.report_node(topology_pb2.Node()), "node.node_id"),
        (client.report_node(negative), "node.memory_available_bytes"),
        (client.report_node(node("c", port=0)), "node.endpoints[0].port"),
        (client.report_node(too_fast), "node.weight_bytes_per_second"),
        (client.report_links("a", link("b", "a")), "links[0].source_node_id"),
        (client.report_links("a", link("a", "b", "10.0.0.9")), "links[0].sink_address"),
        (client.report_links("a", link("a", "b", "0.0.0.0")), "links[0].sink_address"),
        (client.report_links("a", late), "links[0].round_trip"),
        (client.report_links("a", absurd), "links[0].throughput_bytes_per_second"),
        (client.report_links("a", lost), "links[0].sink_port"),
        (client.report_links("a", link("a", "b"), link("a", "b")), "links[1]"),
        (client.remove("x" * 10_000), "node_id"),
    ):
        with pytest.raises(ShardringError) as caught:
            await call
        assert caught.value.reason is Reason.INVALID_FIELD
        assert caught.value.metadata["field"] == field
    for gone in (client.report_links("nobody"), client.remove("nobody")):
        with pytest.raises(ShardringError) as caught:
            await gone
        assert caught.value.reason is Reason.NODE_NOT_FOUND
    assert (await client.get()).revision == revision
    assert await client.pairs() == {("a", "b")}


async def test_loopback_links_are_for_the_lab_only() -> None:
    async with started("services.topology", "--listen", "127.0.0.1:0") as (_, address):
        client = Client(address)
        await client.report_node(node("a"))
        await client.report_node(node("b"))
        with pytest.raises(ShardringError) as caught:
            await client.report_links("a", link("a", "b"))
        assert caught.value.metadata["field"] == "links[0].sink_address"
        await client.remote.close()


async def test_what_a_newer_client_sends_does_no_harm(client: Client) -> None:
    newer = node("a")
    newer.interfaces.add(name="warp0", kind=99, addresses=["127.0.0.1"])
    newer.backends.extend([99, common_pb2.BACKEND_CPU])  # type: ignore[list-item]
    await client.report_node(newer)
    (served,) = (await client.get()).topology.nodes
    assert served.interfaces[0].kind == topology_pb2.INTERFACE_KIND_UNKNOWN
    assert list(served.backends) == [common_pb2.BACKEND_CPU]


async def test_leases_end_and_gathering_does() -> None:
    async with topology() as (_, client), client.watch() as responses:
        assert (await anext(responses)).snapshot.gathering
        await client.report_node(node("a"))
        await client.report_node(node("b"))
        await client.report_links("a", link("a", "b"))

        async def settled() -> bool:
            answer = (await client.get()).topology
            return not answer.gathering and not answer.nodes and not answer.links

        await eventually(settled)
        changes = [await anext(responses) for _ in range(3)]
        assert all(response.change.gathering for response in changes)
        removed: list[str] = []
        while sorted(removed) != ["a", "b"]:
            response = await anext(responses)
            removed += response.change.removed_node_ids
            # A node that goes takes its links along without a word.
            assert not response.change.relinked_source_node_ids
        assert not response.change.gathering


async def test_stopping_is_prompt_and_clean_with_watchers() -> None:
    async with topology() as (process, client), client.watch() as responses:
        await anext(responses)
        process.terminate()
        with pytest.raises(ShardringError) as caught:
            await anext(responses)
        assert caught.value.reason is Reason.SHUTTING_DOWN
        async with asyncio.timeout(10):
            assert await process.wait() == 0


async def test_health_is_serving(client: Client) -> None:
    stub: Any = health_pb2_grpc.HealthStub(client.remote.channel)  # its types are synchronous

    async def serving() -> bool:
        answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=5)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    await eventually(serving)


async def test_a_taken_port_and_bad_options_end_with_a_sentence(client: Client) -> None:
    for options, words in (
        (["--listen", str(client.address)], b"port is taken"),
        (["--listen", "nonsense"], b"host:port"),
        (["--listen", "127.0.0.1:0", "--heartbeat-seconds", "0"], b"0.1 to 60"),
    ):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "services.topology", *options, stderr=asyncio.subprocess.PIPE
        )
        _, errors = await asyncio.wait_for(process.communicate(), 30)
        assert process.returncode == 1
        assert words in errors
        assert b"Traceback" not in errors
