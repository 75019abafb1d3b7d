"""Agents with real identity servers around a real topology process."""

import contextlib
import logging
from contextlib import AsyncExitStack, aclosing
from itertools import permutations
from pathlib import Path

import pytest

from services.common.addresses import HostPort
from services.common.channel import Remote
from services.common.errors import Reason, ShardringError
from services.common.server import start_server
from services.topology.agent.bursts import BurstGate, measure
from services.topology.agent.identify import identify
from services.topology.agent.rpc import identity_registration
from shardring.topology.v1 import node_identity_service_pb2, topology_pb2
from shardring.topology.v1.node_identity_service_pb2_grpc import NodeIdentityServiceStub
from tests.contract.topology_lab import (
    LOOPBACK,
    Client,
    eventually,
    lab_node,
    started,
    topology,
)


async def linked(client: Client, *node_ids: str) -> None:
    """Wait until exactly these nodes are there and linked both ways."""

    async def settled() -> bool:
        ids, pairs = await client.node_ids(), await client.pairs()
        return ids == set(node_ids) and pairs == set(permutations(node_ids, 2))

    await eventually(settled)


async def test_nodes_find_each_other_and_leave() -> None:
    async with topology() as (_, client), AsyncExitStack() as stack:
        nodes = [await stack.enter_async_context(lab_node(client.address, i)) for i in "abc"]
        for node in nodes:
            await node.agent.registered.wait()
        await linked(client, "a", "b", "c")
        answer = (await client.get()).topology
        assert {node.name for node in answer.nodes} == {"name-a", "name-b", "name-c"}
        for link in answer.links:
            assert link.sink_address == "127.0.0.1"
            assert link.kind == topology_pb2.INTERFACE_KIND_VIRTUAL
            assert 0 < link.round_trip.nanos < 1_000_000_000

        async def all_asked() -> bool:
            return not (await client.get()).topology.probing_node_ids

        await eventually(all_asked)
        await nodes[2].leave()
        # Gone at once, not when the lease ends.
        assert await client.node_ids() == {"a", "b"}
        await linked(client, "a", "b")


async def test_a_killed_node_goes_with_its_links_and_its_next_run_takes_its_place(
    tmp_path: Path,
) -> None:
    command = ["tests.contract.topology_lab", "--data-folder", str(tmp_path)]
    async with topology() as (_, client), lab_node(client.address, "a"):
        command += ["--topology", str(client.address)]
        async with started(*command) as (process, _):
            (node_id,) = await client.node_ids() - {"a"}
            await linked(client, "a", node_id)
            process.kill()
            await process.wait()
        await linked(client, "a")
        async with started(*command):
            await linked(client, "a", node_id)
        await linked(client, "a")


async def test_a_restarted_topology_service_has_the_whole_picture_again() -> None:
    async with AsyncExitStack() as stack:
        async with topology() as (process, client):
            for node_id in "ab":
                await stack.enter_async_context(lab_node(client.address, node_id))
            await linked(client, "a", "b")
            before = (await client.get()).revision
            process.kill()
            await process.wait()
        async with topology(listen=client.address) as (_, restarted):
            await linked(restarted, "a", "b")
            assert (await restarted.get()).revision > before
            # What was lost with the old process is said, rather than passed over.
            with pytest.raises(ShardringError) as caught:
                async with restarted.watch(after_revision=before) as responses:
                    await anext(responses)
            assert caught.value.reason is Reason.REVISION_COMPACTED
            # And the agents follow the new one: they link a newcomer.
            await stack.enter_async_context(lab_node(client.address, "c"))
            await linked(restarted, "a", "b", "c")
            await stack.aclose()


async def test_an_address_that_falls_silent_is_no_link_until_it_answers_again() -> None:
    async with (
        topology() as (_, client),
        lab_node(client.address, "a"),
        lab_node(client.address, "b") as node,
    ):
        await linked(client, "a", "b")
        await node.server.stop()

        async def one_way() -> bool:
            return await client.pairs() == {("b", "a")}

        await eventually(one_way)
        (link,) = (await client.get()).topology.links
        assert link.one_way
        # The node itself is alive and says so.
        assert await client.node_ids() == {"a", "b"}
        again = await start_server(
            HostPort("127.0.0.1", node.server.port), [identity_registration("b")]
        )
        await linked(client, "a", "b")
        await again.stop()


async def test_a_node_that_was_removed_comes_back_with_its_next_report() -> None:
    async with topology() as (_, client), lab_node(client.address, "a"):
        await linked(client, "a")
        await client.remove("a")
        await linked(client, "a")


async def test_agents_wait_for_a_topology_service_that_is_not_there_yet() -> None:
    # A port that was free a moment ago.
    server = await start_server(LOOPBACK, [])
    address = HostPort("127.0.0.1", server.port)
    await server.stop()
    async with lab_node(address, "a") as node:

        async def noted() -> bool:
            return node.agent.refusal is not None

        await eventually(noted)
        assert node.agent.refusal is not None
        assert node.agent.refusal.reason is Reason.SERVICE_UNAVAILABLE
        assert str(address) in node.agent.refusal.message
        assert not node.agent.registered.is_set()
        async with topology(listen=address) as (_, client):
            await linked(client, "a")
            await node.agent.registered.wait()
            assert node.agent.refusal is None
            await node.leave()


async def test_another_identity_at_an_address_is_no_link(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    async with (
        topology() as (_, client),
        lab_node(client.address, "a"),
        lab_node(client.address, "b"),
        lab_node(client.address, "c", answers_as="x"),
    ):

        async def settled() -> bool:
            return len(await client.pairs()) == 4 and "c" in caplog.text

        await eventually(settled)
        # c reaches the others; nobody reaches c.
        assert await client.pairs() == {("a", "b"), ("b", "a"), ("c", "a"), ("c", "b")}

        async def listed() -> bool:
            found = (await client.get()).topology.misdirections
            sources = [
                (m.source_node_id, m.expected_node_id, m.answered_node_id, m.address) for m in found
            ]
            return sources == [("a", "c", "x", "127.0.0.1"), ("b", "c", "x", "127.0.0.1")]

        await eventually(listed)
        links = (await client.get()).topology.links
        assert {link.source_node_id for link in links if link.one_way} == {"c"}
        said = [r.getMessage() for r in caplog.records if "node x answers" in r.getMessage()]
        assert len(said) == 2  # once by each of a and b, though they probe on
        assert all("not node c: no link" in message for message in said)


async def test_of_two_nodes_with_one_id_the_later_stays_and_the_earlier_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with topology() as (_, client), lab_node(client.address, "a", start_ns=1_000) as early:
        await early.agent.registered.wait()
        async with lab_node(client.address, "a", start_ns=2_000) as late:

            async def refused() -> bool:
                return not early.agent.registered.is_set()

            await eventually(refused)
            refusal = early.agent.refusal
            assert refusal is not None
            assert refusal.reason is Reason.NODE_ID_DUPLICATE
            assert refusal.metadata["held_by"] == f"name-a (127.0.0.1:{late.server.port})"
            assert refusal.metadata["claimed_by"] == f"name-a (127.0.0.1:{early.server.port})"
            (served,) = (await client.get()).topology.nodes
            assert served.endpoints[0].port == late.server.port
            # The later one may have said its own error by now: that the earlier reported its id.
            told = [r for r in caplog.records if r.message.startswith("Not registered")]
            assert [r.levelno for r in told] == [logging.ERROR]
        # The later one has left: the place is free again.
        await early.agent.registered.wait()
        assert early.agent.refusal is None


async def test_identify_answers_with_id_and_nonce_and_wants_a_nonce() -> None:
    server = await start_server(LOOPBACK, [identity_registration("a")])
    remote = Remote("node", [HostPort("127.0.0.1", server.port)])
    assert await identify(remote, timeout=5) == "a"
    identify_call = NodeIdentityServiceStub(remote.channel).Identify
    for nonce in (b"", b"x" * 15, b"x" * 65):
        request = node_identity_service_pb2.IdentifyRequest(nonce=nonce)
        with pytest.raises(ShardringError) as caught:
            await remote.unary(identify_call, request, timeout=5)
        assert caught.value.reason is Reason.INVALID_FIELD
    await remote.close()
    await server.stop()


async def test_links_are_measured_and_carry_where_they_lead() -> None:
    async with (
        topology() as (_, client),
        lab_node(client.address, "a") as a,
        lab_node(client.address, "b") as b,
    ):

        async def measured() -> bool:
            links = (await client.get()).topology.links
            return len(links) == 2 and all(link.throughput_bytes_per_second for link in links)

        await eventually(measured)
        for link in (await client.get()).topology.links:
            node = a if link.sink_node_id == "a" else b
            assert link.sink_port == node.server.port
            assert link.source_interface
            assert link.round_trip.nanos <= link.round_trip_median.nanos
            # More than any wire of today carries would be a defect of the measurement.
            assert 10**6 < link.throughput_bytes_per_second < 10**11
            assert link.HasField("throughput_age")


async def test_a_burst_is_refused_while_another_one_runs_or_the_node_generates() -> None:
    generating = False
    sink, source = BurstGate("b", lambda: generating), BurstGate("a")
    server = await start_server(LOOPBACK, [identity_registration("b", sink)])
    address = HostPort("127.0.0.1", server.port)
    assert await measure("b", address, source) > 10**6

    async def busy_with() -> str:
        with pytest.raises(ShardringError) as caught:
            await measure("b", address, source)
        assert caught.value.reason is Reason.MEASUREMENT_BUSY
        return caught.value.metadata["busy_with"]

    with sink.entered():
        assert await busy_with() == "another burst"
    with source.entered():
        assert await busy_with() == "another burst"
    generating = True
    assert await busy_with() == "generating"
    generating = False
    assert await measure("b", address, source) > 10**6
    with pytest.raises(ShardringError) as caught:
        await measure("c", address, source)
    assert caught.value.reason is Reason.WRONG_NODE
    await server.stop()


@pytest.mark.parametrize("byte_count", [0, -1, 16 * 2**20 + 1, 2**62])
async def test_a_burst_is_bounded(byte_count: int) -> None:
    server = await start_server(LOOPBACK, [identity_registration("b")])
    remote = Remote("node", [HostPort("127.0.0.1", server.port)])
    call = NodeIdentityServiceStub(remote.channel).MeasureLink
    request = node_identity_service_pb2.MeasureLinkRequest(byte_count=byte_count)
    with pytest.raises(ShardringError) as caught:
        async for _ in remote.stream(call, request, timeout=5):
            pass
    assert caught.value.reason is Reason.INVALID_FIELD
    await remote.close()
    await server.stop()


async def test_a_burst_that_is_left_early_lets_the_next_one_in() -> None:
    server = await start_server(LOOPBACK, [identity_registration("b")])
    remote = Remote("node", [HostPort("127.0.0.1", server.port)])
    call = NodeIdentityServiceStub(remote.channel).MeasureLink
    request = node_identity_service_pb2.MeasureLinkRequest(byte_count=16 * 2**20)
    async with aclosing(remote.stream(call, request, timeout=5)) as parts:
        await anext(parts)

    async def free() -> bool:
        with contextlib.suppress(ShardringError):
            async with aclosing(remote.stream(call, request, timeout=5)) as parts:
                return sum([len(part.payload) async for part in parts]) > 0
        return False

    await eventually(free, 5)
    await remote.close()
    await server.stop()
