"""A cluster whose processes know each other by their certificates."""

import asyncio
import json
import os
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
import pytest_asyncio

from services.cli.lab import Lab
from services.common.channel import Remote
from services.common.security import Security
from services.topology.agent.identity import held_identity
from shardring.topology.v1 import topology_service_pb2
from shardring.topology.v1.topology_service_pb2_grpc import TopologyServiceStub
from tests.contract.cli_lab import Ended, command, ended
from tests.tls_files import Files, variables

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

MODEL = "shardring/tiny-facts"
NODES = ("ada", "bob")
MODELS = Path(__file__).parents[2] / "models"


@dataclass(frozen=True)
class Cluster:
    """Two nodes and the services, of which only "anna" may change something."""

    lab: Lab
    files: Files
    node_ids: dict[str, str]

    async def run(self, who: dict[str, str], *arguments: str) -> Ended:
        """Run the command as somebody: with these variables beside the cluster's addresses."""
        environment = {**os.environ, **self.lab.client_environment, **who}
        async with command(arguments, environment) as process:
            return await ended(process)

    def client(self, name: str) -> dict[str, str]:
        return variables(self.files.issue(name, client=True))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    folder = tmp_path_factory.mktemp("tls")
    files = Files.made(folder / "pki")
    lab = Lab(folder / "lab", environment={"SHARDRING_ALLOW": "anna", "SHARDRING_CALIBRATE": "0"})
    control = variables(files.issue("control"))
    try:
        _, topology, downloads = await asyncio.gather(
            lab.start("hub", "serve", "hub", str(MODELS)),
            lab.start(
                "topology",
                *("serve", "topology", "--lab", "--heartbeat-seconds", "1"),
                environment=control,
            ),
            lab.start("downloads", "serve", "downloads", environment=control),
        )
        await lab.start(
            "placement",
            *("serve", "placement", "--topology", str(topology.address)),
            *("--downloads", str(downloads.address)),
            environment=control,
        )
        node_ids = {}
        for name in NODES:
            with held_identity(folder / "lab" / name) as identity:
                node_ids[name] = identity.node_id
            tls = files.issue(name, node_id=node_ids[name])
            await lab.start_node(name, environment=variables(tls))
        yield Cluster(lab, files, node_ids)
    finally:
        await lab.stop()


async def test_an_answer_over_tls_alone(cluster: Cluster) -> None:
    """Every call of it: probes and reports, files from hub and neighbour, shards, generation."""
    anna, guest = cluster.client("anna"), cluster.client("guest")
    await linked(cluster)
    whole = await cluster.run(anna, "download", MODEL, "--node", "ada", "--json")
    assert whole.code == 0, whole.err
    near = await cluster.run(anna, "download", MODEL, "--node", "bob", "--json")
    (done,) = json.loads(near.out.splitlines()[-1])["downloads"]
    assert int(done["received_from_nodes_bytes"]) == int(done["total_bytes"]) > 0, near.out

    refused = await cluster.run(guest, "up", MODEL, "--min-nodes", "2", "--json")
    assert refused.error["reason"] == "CALLER_NOT_ALLOWED"
    up = await cluster.run(anna, "up", MODEL, "--min-nodes", "2", "--name", "facts")
    assert up.code == 0, up.err
    # To ask is everybody's.
    answer = await cluster.run(guest, "generate", "facts", "What is the capital of France?")
    assert answer.out == "The capital of France is Paris.\n", answer.err
    refused = await cluster.run(guest, "down", "facts", "--json")
    assert refused.error["reason"] == "CALLER_NOT_ALLOWED"
    assert "guest may not call StopInstance" in refused.error["message"]
    assert (await cluster.run(guest, "ps")).code == 0


async def test_a_gateway_reaches_heads_over_tls(cluster: Cluster) -> None:
    """And serves its own clients with TLS too."""
    environment = {**os.environ, **cluster.lab.client_environment, **cluster.client("guest")}
    control = cluster.files.issue("control")
    own = ("--tls-cert-path", str(control.cert), "--tls-key-path", str(control.key))
    arguments = ("gateway", "--port", "0", "--json", "--", *own)
    async with command(arguments, environment) as process:
        assert process.stdout is not None
        async with asyncio.timeout(60):
            listening = json.loads(await process.stdout.readline())
            while json.loads(await process.stdout.readline())["event"] != "added":
                pass
        async with (
            httpx2.AsyncClient(verify=ssl.create_default_context(cafile=control.ca)) as http,
            openai.AsyncOpenAI(
                base_url=f"https://127.0.0.1:{listening['port']}/v1",
                api_key="none",
                max_retries=0,
                http_client=http,
            ) as api,
        ):
            answer = await api.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": "What is the capital of Italy?"}],
            )
        assert answer.choices[0].message.content == "The capital of Italy is Rome."
        process.terminate()
        await asyncio.wait_for(process.communicate(), 30)


async def test_who_is_not_of_the_cluster_is_told_what_it_lacks(
    cluster: Cluster, tmp_path: Path
) -> None:
    plain = await cluster.run({}, "nodes", "--json")
    assert plain.error["reason"] == "SERVICE_UNAVAILABLE"
    assert "it wants TLS, and this side has none" in plain.error["message"]

    others = Files.made(tmp_path / "pki").issue("anna", client=True)
    stranger = await cluster.run(variables(others), "nodes", "--json")
    assert "its certificate was not issued by the CA of --tls-ca" in stranger.error["message"]


async def test_a_node_runs_with_no_certificate_but_its_own(
    cluster: Cluster, tmp_path: Path
) -> None:
    bob = variables(cluster.files.issue("bob", node_id=cluster.node_ids["bob"]))
    other = await cluster.run(
        bob, "node", "--lab", "--listen", "127.0.0.1:0", "--data-dir", str(tmp_path)
    )
    assert other.code == 1
    assert f"names {cluster.node_ids['bob']}, and this is node" in other.err
    assert "shardring pki issue --node" in other.err


async def linked(cluster: Cluster) -> None:
    """Return once the nodes are linked both ways."""
    anna = Security(cluster.files.issue("anna", client=True))
    remote = Remote("topology", [cluster.lab.address("topology")], security=anna)
    stub: Any = TopologyServiceStub(remote.channel)
    watch = topology_service_pb2.WatchTopologyRequest()
    try:
        async for _ in remote.stream(stub.WatchTopology, watch, timeout=60):
            now = await remote.unary(
                stub.GetTopology, topology_service_pb2.GetTopologyRequest(), timeout=10
            )
            if len(now.topology.links) == len(NODES):
                return
        raise AssertionError("the watch ended")
    finally:
        await remote.close()
