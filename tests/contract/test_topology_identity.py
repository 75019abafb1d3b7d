"""Two machines with one node id, around a real topology process."""

import logging
import shutil
from pathlib import Path

import pytest

from services.common.errors import Reason, ShardringError
from services.topology.agent.identity import Identity, held_identity
from shardring.topology.v1 import topology_pb2
from tests.contract.topology_lab import Client, LabNode, eventually, lab_node, topology


async def settled(client: Client, held: LabNode, refused: LabNode) -> topology_pb2.Topology:
    """Wait until one of two nodes is listed and the other one is known to be refused."""

    async def listed() -> bool:
        return bool((await client.get()).topology.identity_conflicts)

    await eventually(listed)
    answer = (await client.get()).topology
    (node,) = answer.nodes
    assert node.endpoints[0].port == held.server.port
    (conflict,) = answer.identity_conflicts
    assert conflict.held_by == f"name-a (127.0.0.1:{held.server.port})"
    assert conflict.claimed_by == f"name-a (127.0.0.1:{refused.server.port})"
    return answer


async def test_a_clone_is_refused_however_late_it_started_and_both_are_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with (
        topology() as (_, client),
        lab_node(client.address, "a", start_ns=1_000, fingerprint="first") as first,
    ):
        await first.agent.registered.wait()
        async with lab_node(client.address, "a", start_ns=2_000, fingerprint="clone") as clone:
            await settled(client, first, clone)

            async def both_told() -> bool:
                told = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
                return len(told) == 2

            await eventually(both_told)
            ports = {f"127.0.0.1:{node.server.port}" for node in (first, clone)}
            refused = [r.getMessage() for r in caplog.records if "Not registered" in r.getMessage()]
            assert len(refused) == 1
            assert all(port in refused[0] for port in ports)
            warned = [
                r.getMessage() for r in caplog.records if "also reported by" in r.getMessage()
            ]
            assert len(warned) == 1
            assert f"127.0.0.1:{clone.server.port}" in warned[0]
            assert clone.agent.refusal is not None
            assert clone.agent.refusal.reason is Reason.NODE_ID_DUPLICATE
            assert first.agent.refusal is None
            assert first.agent.registered.is_set()
            assert not clone.agent.registered.is_set()
        # The clone stops, without taking the first one's place away as it goes.
        assert await client.node_ids() == {"a"}

        async def over() -> bool:
            return not (await client.get()).topology.identity_conflicts

        await eventually(over)


async def test_the_same_machine_takes_its_old_place_while_the_old_lease_still_runs() -> None:
    async with topology("--heartbeat-seconds", "20") as (_, client):
        async with lab_node(client.address, "a", fingerprint="one") as before:
            await before.agent.registered.wait()
            # As a crash does: gone without a word, and with a lease of a minute.
            before.agent.registered.clear()
        assert await client.node_ids() == {"a"}
        async with lab_node(client.address, "a", start_ns=2_000, fingerprint="one") as after:
            await after.agent.registered.wait()
            answer = (await client.get()).topology
            assert [node.endpoints[0].port for node in answer.nodes] == [after.server.port]
            assert not answer.identity_conflicts


async def test_a_copied_folder_on_one_machine_is_another_node(tmp_path: Path) -> None:
    def identity(folder: Path) -> Identity:
        with held_identity(folder, lambda: {"dmi": frozenset({"board"})}) as held:
            return held

    first = identity(tmp_path / "node")
    shutil.copytree(tmp_path / "node", tmp_path / "copy")
    copy = identity(tmp_path / "copy")
    assert copy.node_id == first.node_id
    async with (
        topology() as (_, client),
        lab_node(client.address, first.node_id, fingerprint=first.fingerprint) as held,
    ):
        await held.agent.registered.wait()
        claim = topology_pb2.Node()
        claim.CopyFrom((await client.get()).topology.nodes[0])
        claim.machine_fingerprint = copy.fingerprint
        claim.start_time.FromNanoseconds(copy.start_ns)
        with pytest.raises(ShardringError, match="also claimed by"):
            await client.report_node(claim)
