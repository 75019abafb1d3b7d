"""`shardring`: help, errors, and the commands that only read."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator

import pytest
from click.testing import CliRunner

from services.cli.lazy import Lazy
from services.cli.main import COMMANDS, cli
from shardring.common.v1 import common_pb2
from shardring.downloads.v1 import downloads_pb2, downloads_service_pb2
from shardring.placement.v1 import placement_service_pb2
from shardring.runner.v1 import runner_pb2
from shardring.topology.v1 import topology_pb2
from tests.contract.cli_lab import (
    MODEL,
    FakeCluster,
    command,
    ended,
    fake_cluster,
    instance_of,
    ready,
)

NOWHERE = {"SHARDRING_CLUSTER": "127.0.0.1", "SHARDRING_TOPOLOGY": "127.0.0.1:1"}


@pytest.fixture
async def cluster() -> AsyncIterator[FakeCluster]:
    async with fake_cluster("ada", "bob") as cluster:
        yield cluster


def _all(
    entries: dict[str, Lazy], before: tuple[str, ...] = ()
) -> list[tuple[tuple[str, ...], Lazy]]:
    found = []
    for name, entry in entries.items():
        found.append(((*before, name), entry))
        found += _all(dict(entry.commands or {}), (*before, name))
    return found


@pytest.mark.parametrize(("path", "entry"), _all(COMMANDS), ids=lambda value: str(value)[:40])
def test_every_command_has_help_with_its_own_example(path: tuple[str, ...], entry: Lazy) -> None:
    shown = CliRunner().invoke(cli, [*path, "--help"])
    assert shown.exit_code == 0, shown.output
    example = shown.output.split("Example:\n")[1].strip()
    assert example == entry.example
    # Some write where only root may.
    assert example.removeprefix("sudo ").startswith(" ".join(("shardring", *path)))


async def test_help_imports_no_service_nor_grpc() -> None:
    code = (
        "import sys; from services.cli.main import cli;"
        "cli(['--help'], standalone_mode=False);"
        "heavy = {'grpc', 'mlx', 'rich', 'opentelemetry', 'huggingface_hub', 'networkx'};"
        "sys.exit(', '.join(heavy & set(sys.modules)) or 0)"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    run = await ended(process)
    assert (run.code, run.err) == (0, "")
    assert "generate" in run.out


async def test_a_client_imports_no_mlx() -> None:
    code = (
        "import sys, importlib; from services.cli.main import COMMANDS;"
        "[importlib.import_module(e.target.partition(':')[0])"
        " for n, e in COMMANDS.items() if e.target and n != 'node'];"
        "heavy = {'mlx', 'mlx_lm', 'huggingface_hub', 'networkx'};"
        "sys.exit(', '.join(heavy & set(sys.modules)) or 0)"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    run = await ended(process)
    assert (run.code, run.err) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "service"),
    [
        (["nodes"], "topology"),
        (["preview", MODEL], "placement"),
        (["download", MODEL], "downloads"),
    ],
)
async def test_a_service_that_is_down_is_named(
    cluster: FakeCluster, arguments: list[str], service: str
) -> None:
    run = await cluster.run(*arguments, f"--{service}", "127.0.0.1:1")
    assert (run.code, run.out) == (1, "")
    first, reason = run.err.splitlines()
    assert first.startswith(f"Cannot reach {service} at 127.0.0.1:1: ")
    assert reason == "SERVICE_UNAVAILABLE"


async def test_an_error_as_json(cluster: FakeCluster) -> None:
    run = await cluster.run("ps", "--json", "--topology", "127.0.0.1:1")
    assert (run.code, run.out) == (1, "")
    assert run.error["reason"] == "SERVICE_UNAVAILABLE"
    assert run.error["metadata"] == {"service": "topology", "address": "127.0.0.1:1"}
    assert run.error["message"].startswith("Cannot reach topology")


async def test_a_bad_address_and_a_bad_flag(cluster: FakeCluster) -> None:
    run = await cluster.run("nodes", "--cluster", "studio-1:52410")
    assert run.code == 1
    assert "without a port" in run.err
    assert "INVALID_FIELD" in run.err
    assert (await cluster.run("nodes", "--sideways")).code == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["preview", "org/\udcff"], "model is not UTF-8 text"),
        (["down", "fine", "\udcff"], "instance_ids is not UTF-8 text"),
        (["ps", "--cluster", "\udcff"], "cluster is not UTF-8 text"),
        (["up", MODEL, "--min-nodes", "99999999999"], "--min-nodes"),
    ],
)
async def test_what_no_message_can_hold_is_misuse(
    cluster: FakeCluster, arguments: list[str], words: str
) -> None:
    run = await cluster.run(*arguments)
    assert (run.code, run.out) == (2, "")
    assert words in run.err
    assert "Traceback" not in run.err


@pytest.mark.parametrize(
    ("redirection", "words"),
    [("> /dev/full", "Cannot write the output: No space left on device."), (">&-", "")],
)
@pytest.mark.parametrize("arguments", ["nodes", "ps --json", "--help"])
async def test_output_that_goes_nowhere(
    cluster: FakeCluster, arguments: str, redirection: str, words: str
) -> None:
    process = await asyncio.create_subprocess_shell(
        f'"{sys.executable}" -m services.cli {arguments} {redirection}',
        stderr=asyncio.subprocess.PIPE,
        env=cluster.environment,
    )
    async with asyncio.timeout(30):
        _, err = await process.communicate()
    assert (process.returncode, err.decode().strip()) == (1 if words else 0, words)


async def test_a_reader_that_leaves_is_no_drama(cluster: FakeCluster) -> None:
    async with cluster.running("nodes") as process:
        assert process.stdout is not None
        process.stdout._transport.close()  # type: ignore[attr-defined]
        assert process.stderr is not None
        async with asyncio.timeout(30):
            err = await process.stderr.read()
            code = await process.wait()
    assert (code, err) == (1, b"")


async def test_nodes(cluster: FakeCluster) -> None:
    run = await cluster.run("nodes")
    header, ada, bob = run.out.splitlines()
    assert header.split()[:3] == ["NODE", "ID", "ADDRESS"]
    assert ada.split()[0] == "ada"
    assert "16.0 GB" in ada
    assert "8.0 GB" in bob
    document = (await cluster.run("nodes", "--json")).document
    assert [node["name"] for node in document["nodes"]] == ["ada", "bob"]
    assert document["nodes"][0]["memory_total_bytes"] == "16000000000"
    assert document["gathering"] is False


async def test_no_nodes_yet() -> None:
    async with fake_cluster() as cluster:
        run = await cluster.run("nodes")
        assert run.code == 0
        assert "No node is alive" in run.err
        cluster.topology.topology.gathering = True
        assert "may still be missing" in (await cluster.run("nodes")).err


async def test_links_marks_what_is_missing(cluster: FakeCluster) -> None:
    ids = {name: fake.node.node_id for name, fake in cluster.nodes.items()}
    cluster.topology.topology.links.append(
        topology_pb2.Link(
            source_node_id=ids["ada"],
            sink_node_id=ids["bob"],
            sink_address="10.0.0.2",
            kind=topology_pb2.INTERFACE_KIND_MAYBE_ETHERNET,
        )
    )
    run = await cluster.run("links")
    assert "one-way" in run.out
    assert "maybe ethernet" in run.out
    document = (await cluster.run("links", "--json")).document
    assert [link["sink_address"] for link in document["links"]] == ["10.0.0.2"]


async def test_models_reads_every_page(cluster: FakeCluster) -> None:
    ada = cluster.nodes["ada"].node.node_id
    half = downloads_pb2.NodeFraction(
        node_id=ada,
        fraction=0.5,
        state=downloads_pb2.DOWNLOAD_STATE_ONGOING,
        downloaded_bytes=1000,
        total_bytes=2000,
    )
    disk = downloads_service_pb2.NodeDisk(node_id=ada, available_bytes=120_000_000_000)
    cluster.downloads.disks = [disk]
    cluster.downloads.models = [
        downloads_service_pb2.ModelOnNodes(model_id="org/a", fractions=[half]),
        downloads_service_pb2.ModelOnNodes(
            model_id="org/b",
            model=downloads_pb2.Model(
                model_type="t5", layer_count=7, weight_bytes=9000, engine_supported=False
            ),
        ),
    ]
    run = await cluster.run("models")
    header, first, second, free = run.out.splitlines()
    assert header.split() == ["MODEL", "SIZE", "ada", "bob"]
    assert first.split() == ["org/a", "2.0", "kB", "50", "%", "fetching", "-"]
    assert second.split() == ["org/b", "9.0", "kB", "-", "-"]
    assert free.split() == ["free", "120", "GB", "-"]
    assert run.err.strip() == "mlx-lm does not run org/b."
    assert "bob" not in (await cluster.run("models", "--nodes", "ada")).out
    document = (await cluster.run("models", "--json")).document
    assert [entry["model_id"] for entry in document["models"]] == ["org/a", "org/b"]
    assert document["disks"] == [{"node_id": ada, "available_bytes": "120000000000"}]


async def test_a_model_s_facts_and_where_it_is(cluster: FakeCluster) -> None:
    ada = cluster.nodes["ada"].node.node_id
    whole = downloads_pb2.NodeFraction(
        node_id=ada, fraction=1, state=downloads_pb2.DOWNLOAD_STATE_COMPLETED, total_bytes=5000
    )
    cluster.downloads.facts = downloads_pb2.Model(
        model_id="org/a",
        model_type="llama",
        engine_supported=True,
        tensor_supported=True,
        gated=True,
        license="mit",
        layer_count=2,
        layer_bytes=[1000, 1000],
        context_token_count=4096,
        key_value_bytes_per_token=1000,
    )
    cluster.downloads.models = [
        downloads_service_pb2.ModelOnNodes(model_id=name, fractions=[whole])
        for name in ("org/a", "org/b")
    ]
    run = await cluster.run("models", "org/a")
    lines = [" ".join(line.split()) for line in run.out.splitlines()]
    assert "architecture llama: mlx-lm runs it" in lines
    assert "key-value cache 1.0 kB a token, 4.1 MB at full context" in lines
    assert "tensor split yes" in lines
    assert "stages" not in run.out
    assert "licence mit" in lines
    assert "gated yes: fetching it takes a token that may read it" in lines
    assert "org/a 5.0 kB 100 % -" in lines
    assert "org/b" not in run.out
    document = (await cluster.run("models", "org/a", "--json")).document
    assert document["model"]["key_value_bytes_per_token"] == "1000"
    for cuts, told in (([1], "cut before any layer"), ([], "one only: a reason")):
        obstacle = "" if cuts else "a reason"
        cluster.downloads.facts.cuts.CopyFrom(downloads_pb2.Cuts(layers=cuts, obstacle=obstacle))
        run = await cluster.run("models", "org/a")
        assert f"stages {told}" in [" ".join(line.split()) for line in run.out.splitlines()]
    cluster.downloads.facts = None
    run = await cluster.run("models", "org/a")
    assert (run.code, run.err.splitlines()[-1]) == (1, "MODEL_NOT_FOUND")


async def test_preview_shows_placements_and_refusals(cluster: FakeCluster) -> None:
    refusal = common_pb2.Error(reason="NOT_ENOUGH_MEMORY", message="It needs 9 GB; [ada] has 8.")
    cluster.placement.previews = [
        placement_service_pb2.Preview(node_count=1, refusal=refusal),
        placement_service_pb2.Preview(node_count=2, placement=cluster.ring("bob", "ada")),
    ]
    run = await cluster.run("preview", MODEL, "--hosts")
    assert "NOT_ENOUGH_MEMORY  It needs 9 GB; [ada] has 8." in run.out
    assert "2 nodes (taken by up and run)" in run.out
    assert "10.0.0.1:6000" in run.out
    ranks = [line.split()[:3] for line in run.out.splitlines() if " GB " in line and "%" in line]
    assert ranks == [["0", "bob", "[0,4)"], ["1", "ada", "[4,8)"]]
    document = (await cluster.run("preview", MODEL, "--json")).document
    assert document["previews"][0]["refusal"]["reason"] == "NOT_ENOUGH_MEMORY"


async def test_ps_merges_what_the_nodes_tell(cluster: FakeCluster) -> None:
    ring = cluster.ring("ada", "bob")
    cluster.nodes["ada"].runner.instances["chat"] = ready(ring)
    seen_by_bob = ready(ring, rank=1)
    failed = instance_of(
        cluster.ring("bob"),
        runner_pb2.INSTANCE_STATE_FAILED,
        runner_pb2.SHARD_STATE_FAILED,
        instance_id="broken",
    )
    failed.error.reason, failed.error.message = "NODE_LOST", "Node cyd went away."
    cluster.nodes["bob"].runner.instances |= {"chat": seen_by_bob, "broken": failed}
    run = await cluster.run("ps")
    assert run.out.count("ada:[0,4):READY bob:[4,8):READY") == 1
    assert "broken: Node cyd went away. NODE_LOST" in run.out
    document = (await cluster.run("ps", "--json")).document
    assert {i["instance_id"]: i["rank"] for i in document["instances"]} == {"chat": 0, "broken": 0}
    assert document["unreachable_nodes"] == []


async def test_ps_names_nodes_it_could_not_ask(cluster: FakeCluster) -> None:
    cluster.nodes["bob"].runner.instances["chat"] = ready(cluster.ring("ada", "bob"), rank=1)
    await cluster.nodes["ada"].server.stop()
    run = await cluster.run("ps")
    assert run.code == 0
    assert "chat" in run.out
    assert "Node ada was not asked: Cannot reach node ada" in run.err
    assert (await cluster.run("ps", "--json")).document["unreachable_nodes"] == ["ada"]


async def test_the_environment_and_a_flag_choose_the_services(cluster: FakeCluster) -> None:
    environment = {**cluster.environment, **NOWHERE}
    async with command(["nodes", "--json"], environment) as process:
        assert (await ended(process)).code == 1
    chosen = ["nodes", "--json", "--topology", str(cluster.address)]
    async with command(chosen, environment) as process:
        run = await ended(process)
    assert len(json.loads(run.out)["nodes"]) == 2
