"""The cluster of deploy/compose.yaml, in real containers: what it is made of, that it generates,
and what its clients see when parts of it are killed, cut off, paused, filled or restarted."""

import asyncio
import contextlib
import ipaddress
import re
import shlex
from collections.abc import AsyncIterator
from dataclasses import dataclass

import openai
import pytest_asyncio
import yaml  # type: ignore[import-untyped]

from services.cli.client import Cluster
from services.cli.instances import Wanted, bring_up
from services.cli.runner_client import RunnerClient
from services.common.errors import Reason, ShardringError
from services.common.status import error_from_proto
from shardring.downloads.v1 import downloads_pb2
from shardring.placement.v1 import placement_service_pb2
from shardring.placement.v1.placement_service_pb2_grpc import PlacementServiceStub
from shardring.runner.v1 import runner_pb2
from tests.compose.engine import run
from tests.compose.load import ANSWER, MODEL, SECONDS, Asker, answer, asking, chat, place_request
from tests.compose.stack import CONTROL, NODES, RING_NETWORK, ROOT, SERVICES, Stack

# In how many ways three nodes are linked.
ALL_WAYS = 6
RECOVERY_SECONDS = 120.0
RESTART_SECONDS = 2.0


@dataclass
class Running:
    """An instance on all three nodes, and its clients."""

    instance: runner_pb2.Instance
    head: RunnerClient
    grpc: Asker
    http: Asker

    def node(self, rank: int) -> str:
        return str(self.instance.placement.ranks[rank].node_name)


@pytest_asyncio.fixture
async def cluster(stack: Stack) -> AsyncIterator[Cluster]:
    async with await stack.cluster() as cluster:
        yield cluster


@pytest_asyncio.fixture
async def api(stack: Stack) -> AsyncIterator[openai.AsyncOpenAI]:
    address = await stack.address("gateway")
    async with openai.AsyncOpenAI(
        base_url=f"http://{address}:52470/v1", api_key="none", max_retries=0, timeout=SECONDS
    ) as api:
        yield api


@contextlib.asynccontextmanager
async def running(
    cluster: Cluster, api: openai.AsyncOpenAI, name: str, *, long: bool = True
) -> AsyncIterator[Running]:
    """Start an instance on all three nodes, and wait until the gateway answers for it."""
    wanted = Wanted(MODEL, "", placement_service_pb2.PlacementConstraints(min_node_count=3))
    instance = await bring_up(cluster, wanted, name, _until_over, lambda text: None)
    head = cluster.head(instance.placement)
    try:
        async with asyncio.timeout(RECOVERY_SECONDS):
            while await _refused(chat(api)):
                await asyncio.sleep(0.2)
        yield Running(
            instance,
            head,
            Asker("grpc", lambda: answer(head, name, long=long)),
            Asker("http", lambda: chat(api, long=long)),
        )
    finally:
        with contextlib.suppress(ShardringError):
            await head.stop(name)


async def _until_over(changes: AsyncIterator[runner_pb2.Instance]) -> runner_pb2.Instance:
    async for instance in changes:
        if instance.state in (
            runner_pb2.INSTANCE_STATE_READY,
            runner_pb2.INSTANCE_STATE_FAILED,
            runner_pb2.INSTANCE_STATE_STOPPED,
        ):
            return instance
    raise AssertionError("the watch ended")


async def _refused(call: "object") -> bool:
    try:
        await call  # type: ignore[misc]
    except (openai.OpenAIError, ShardringError):
        return True
    return False


async def linked(cluster: Cluster) -> None:
    """Return once all three nodes are there and linked both ways."""
    async with asyncio.timeout(RECOVERY_SECONDS):
        while True:
            with contextlib.suppress(ShardringError):
                topology = await cluster.topology()
                ways = {(link.source_node_id, link.sink_node_id) for link in topology.links}
                if len(topology.nodes) == len(NODES) and len(ways) == ALL_WAYS:
                    return
            await asyncio.sleep(0.2)


async def generates_again(stack: Stack, cluster: Cluster, api: openai.AsyncOpenAI) -> None:
    """Everything is back by itself: healthy, linked, placed, and right."""
    await stack.healthy(*SERVICES)
    await linked(cluster)
    async with running(cluster, api, "again", long=False) as again:
        assert await answer(again.head, "again") == ANSWER
        assert await chat(api) == ANSWER


async def test_every_container_is_healthy_and_confined(stack: Stack) -> None:
    await stack.healthy(*SERVICES)
    for service in SERVICES:
        made = await stack.inspect(service)
        host, config = made["HostConfig"], made["Config"]
        assert host["ReadonlyRootfs"], service
        assert host["Memory"] > 0, service
        assert host["CapDrop"] == ["ALL"], service
        assert config["User"] == "10001:10001", service
        networks = set(made["NetworkSettings"]["Networks"])
        assert networks == {
            "shardring_control",
            *(["shardring_ring"] if service in NODES else []),
        }
        ports = made["NetworkSettings"]["Ports"] or {}
        published = [place for places in ports.values() for place in places or ()]
        assert len(published) == (service == "gateway")
        assert all(place["HostIp"] == "127.0.0.1" for place in published)


def test_what_observes_fits_in(stack: Stack) -> None:
    deploy = stack.folder / "deploy"
    merged = yaml.safe_load(
        run(
            *("docker-compose", "-f", deploy / "compose.yaml"),
            *("-f", deploy / "compose.observability.yaml", "config"),
            env=stack.environment,
        )
    )["services"]
    assert merged.keys() == {*SERVICES, "collector", "jaeger"}
    for name in set(SERVICES) - {"hub"}:
        variables = merged[name]["environment"]
        assert variables["OTEL_EXPORTER_OTLP_ENDPOINT"] == "http://collector:4317"
        assert variables["SHARDRING_INSECURE"] == "1"
    settings = yaml.safe_load((deploy / "collector.yaml").read_text())
    assert settings["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"] == "0.0.0.0:4317"


async def test_only_the_node_image_has_mlx(stack: Stack) -> None:
    find = "python3 -c 'import importlib.util as u; print(u.find_spec(\"mlx\") is not None)'"
    # With the images' own Python, which is first on their PATH.
    answers = {name: (await stack.shell(name, find)).strip() for name in SERVICES}
    assert answers == {name: str(name in NODES) for name in SERVICES}


async def test_the_documented_command_runs_a_model_on_three_containers(
    stack: Stack, cluster: Cluster
) -> None:
    await linked(cluster)
    page = (ROOT / "docs" / "deployment.md").read_text()
    [command] = re.findall(
        r"^docker compose -f deploy/compose.yaml (exec .*--min-nodes 3)$", page, re.M
    )
    assert (await stack.compose("exec", "-T", *shlex.split(command)[1:])).strip() == ANSWER


async def test_it_generates_over_the_ring_network(
    stack: Stack, cluster: Cluster, api: openai.AsyncOpenAI
) -> None:
    await linked(cluster)
    ring = ipaddress.ip_network(RING_NETWORK)
    async with running(cluster, api, "facts", long=False) as facts:
        assert await answer(facts.head, "facts") == ANSWER
        assert await chat(api) == ANSWER
        ranks = facts.instance.placement.ranks
        assert len(ranks) == len(NODES)
        for rank in ranks:
            hosts = [host.rpartition(":")[0] for host in rank.hosts]
            own = hosts.pop(rank.rank)
            assert own == "0.0.0.0"
            assert all(ipaddress.ip_address(host) in ring for host in hosts)


async def test_control_services_are_restarted_under_load(
    stack: Stack, cluster: Cluster, api: openai.AsyncOpenAI
) -> None:
    await linked(cluster)
    numbers = iter(range(10**6))

    remote = await stack.placement()
    call = PlacementServiceStub(remote.channel).Place

    async def placed() -> str:
        request = place_request(f"request-{next(numbers)}")
        response = await remote.unary(call, request, timeout=SECONDS)
        return str(len(response.placement.ranks))

    async with contextlib.AsyncExitStack() as ending, running(cluster, api, "rolling") as rolling:
        ending.push_async_callback(remote.close)
        placing = Asker("place", placed, pause_seconds=0.1)
        async with asking(rolling.grpc, rolling.http, placing):
            await placing.more()
            for service in CONTROL:
                await stack.compose("restart", service)
                await stack.healthy(service)
                for asker in (rolling.grpc, rolling.http, placing):
                    await asker.more()
        for asker in (rolling.grpc, rolling.http):
            assert asker.errors == [], asker.name
            assert len(asker.texts) == 1, asker.name
        assert placing.texts == {"3"}
        assert placing.refused_seconds <= RESTART_SECONDS, placing.errors


def _is_of_lost_node(error: Exception, name: str) -> None:
    assert isinstance(error, ShardringError)
    assert error.reason is Reason.INSTANCE_FAILED
    assert f"Node {name} with rank 1 is lost" in error.message


async def test_a_killed_node_fails_its_instance_and_comes_back(
    stack: Stack, cluster: Cluster, api: openai.AsyncOpenAI
) -> None:
    await linked(cluster)
    async with running(cluster, api, "killed") as killed, asking(killed.grpc, killed.http):
        await killed.grpc.more(1)
        # The one process that docker-init looks after.
        victim = "kill -KILL $(cat /proc/1/task/1/children)"
        with contextlib.suppress(RuntimeError):  # its container ends while the shell still runs
            await stack.shell(killed.node(1), victim)
        error = await killed.grpc.failed()
        _is_of_lost_node(error, killed.node(1))
        assert isinstance(await killed.http.failed(), openai.OpenAIError)
    await generates_again(stack, cluster, api)


async def test_a_node_cut_off_from_the_ring_network_alone(
    stack: Stack, cluster: Cluster, api: openai.AsyncOpenAI
) -> None:
    await linked(cluster)
    async with running(cluster, api, "cut") as cut:
        lost = await stack.container(cut.node(2))
        async with asking(cut.grpc, cut.http):
            await cut.grpc.more(1)
            await stack.docker("network", "disconnect", "shardring_ring", lost)
            try:
                error = await cut.grpc.failed()
                assert isinstance(error, ShardringError)
                assert isinstance(await cut.http.failed(), openai.OpenAIError)
                # It is still a node of the cluster, and joined to nobody: no ring has room for it.
                await _refused_for(cluster, Reason.NO_RING)
                assert len((await cluster.topology()).nodes) == len(NODES)
            finally:
                await stack.docker("network", "connect", "shardring_ring", lost)
    await generates_again(stack, cluster, api)


async def _refused_for(cluster: Cluster, reason: Reason) -> None:
    """Return once placements on three nodes are refused for this reason."""
    refusal: ShardringError | None = None
    async with asyncio.timeout(RECOVERY_SECONDS):
        while refusal is None or refusal.reason is not reason:
            try:
                await cluster.place(place_request("refused"))
            except ShardringError as error:
                refusal = error
            await asyncio.sleep(0.2)


async def test_a_paused_node_fails_its_instance_and_comes_back(
    stack: Stack, cluster: Cluster, api: openai.AsyncOpenAI
) -> None:
    await linked(cluster)
    async with running(cluster, api, "paused") as paused:
        still = await stack.container(paused.node(1))
        async with asking(paused.grpc, paused.http):
            await paused.grpc.more(1)
            await stack.docker("pause", still)
            try:
                error = await paused.grpc.failed()
                _is_of_lost_node(error, paused.node(1))
                assert isinstance(await paused.http.failed(), openai.OpenAIError)
            finally:
                await stack.docker("unpause", still)
    await generates_again(stack, cluster, api)


async def test_a_full_disk_is_told_and_then_forgotten(
    stack: Stack, cluster: Cluster, api: openai.AsyncOpenAI
) -> None:
    await linked(cluster)
    nodes = {node.name: node.node_id for node in (await cluster.topology()).nodes}
    with contextlib.suppress(ShardringError):  # it may hold nothing of it
        await cluster.delete_model(nodes["node-3"], MODEL)
    # Until nothing more goes in, and then a little less: more than small files, less than weights.
    filler = "/var/cache/huggingface/filler"
    fill = f"dd if=/dev/zero of={filler} bs=64k 2>/dev/null; truncate -s -256k {filler}"
    await stack.shell("node-3", fill)
    try:
        assert await _why_not_fetched(cluster, nodes["node-3"]) is Reason.DISK_FULL
    finally:
        await stack.shell("node-3", f"rm {filler}")
    await generates_again(stack, cluster, api)


async def _why_not_fetched(cluster: Cluster, node_id: str) -> Reason:
    """Have a node fetch the model; return why that failed."""
    try:
        download = await cluster.start_download(node_id, MODEL, "")
    except ShardringError as error:
        return error.reason
    async with asyncio.timeout(RECOVERY_SECONDS):
        while download.state != downloads_pb2.DOWNLOAD_STATE_FAILED:
            await asyncio.sleep(0.2)
            found = await cluster.list_downloads(MODEL)
            [download] = [one for one in found if one.download_id == download.download_id]
    return error_from_proto(download.error).reason
