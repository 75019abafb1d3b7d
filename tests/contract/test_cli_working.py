"""`shardring`: the commands that change something, and how they are interrupted."""

import asyncio
import signal
from collections.abc import AsyncIterator

import pytest

from services.common.errors import Reason, ShardringError
from shardring.common.v1 import common_pb2
from shardring.downloads.v1 import downloads_pb2
from shardring.runner.v1 import runner_pb2
from tests.contract.cli_lab import (
    MODEL,
    FakeCluster,
    FakeRunner,
    answer,
    ended,
    fake_cluster,
    instance_of,
    ready,
)

PORT_TAKEN = ShardringError(Reason.RING_PORT_IN_USE, "Port 6000 of node ada is taken.")


@pytest.fixture
async def cluster() -> AsyncIterator[FakeCluster]:
    async with fake_cluster("ada", "bob") as cluster:
        yield cluster


@pytest.fixture
def head(cluster: FakeCluster) -> FakeRunner:
    """The runner of ada, which is rank 0 of what is placed and becomes READY."""
    runner = cluster.nodes["ada"].runner
    starting = instance_of(
        cluster.placement.placement,
        runner_pb2.INSTANCE_STATE_STARTING,
        runner_pb2.SHARD_STATE_LOADING,
    )
    runner.changes = [starting, ready(cluster.placement.placement)]
    return runner


async def test_up(cluster: FakeCluster, head: FakeRunner) -> None:
    run = await cluster.run("up", MODEL, "--name", "chat", "--min-nodes", "2", "--require", "bob")
    assert (run.code, run.out) == (0, "chat is READY on ada [0,4), bob [4,8)\n")
    assert "rank 1 on bob: LOADING" in run.err
    (request,) = cluster.placement.requests
    assert (request.model_id, request.request_id) == (MODEL, "chat")
    assert request.constraints.min_node_count == 2
    assert list(request.constraints.required_node_ids) == [cluster.nodes["bob"].node.node_id]
    assert (head.started, head.stopped) == (["chat"], [])


async def test_up_as_json_lines(cluster: FakeCluster, head: FakeRunner) -> None:
    run = await cluster.run("up", MODEL, "--json")
    states = [line["instance"]["state"] for line in run.lines]
    assert states == ["INSTANCE_STATE_STARTING", "INSTANCE_STATE_READY"]
    assert run.lines[-1]["instance"]["instance_id"].startswith("model-")
    assert run.err == ""


async def test_up_places_again_when_a_ring_port_is_taken(
    cluster: FakeCluster, head: FakeRunner
) -> None:
    head.start_errors = [PORT_TAKEN, PORT_TAKEN]
    run = await cluster.run("up", MODEL, "--name", "chat")
    assert run.code == 0
    asked = [request.request_id for request in cluster.placement.requests]
    assert asked == ["chat", "chat-2", "chat-3"]
    assert head.started == ["chat"]


async def test_up_gives_up_when_ports_stay_taken(cluster: FakeCluster, head: FakeRunner) -> None:
    head.start_errors = [PORT_TAKEN] * 9
    run = await cluster.run("up", MODEL, "--name", "chat")
    assert run.code == 1
    assert "RING_PORT_IN_USE" in run.err
    assert len(cluster.placement.requests) == 5


async def test_up_tells_why_it_failed(cluster: FakeCluster, head: FakeRunner) -> None:
    failed = instance_of(
        cluster.placement.placement,
        runner_pb2.INSTANCE_STATE_FAILED,
        runner_pb2.SHARD_STATE_FAILED,
    )
    failed.error.CopyFrom(
        common_pb2.Error(
            reason="SHARD_FAILED", message="Rank 1 could not load.", metadata={"phase": "LOADING"}
        )
    )
    head.changes = [failed]
    run = await cluster.run("up", MODEL)
    assert (run.code, run.out) == (1, "")
    assert run.err.splitlines()[-2:] == [
        "Rank 1 could not load.",
        "SHARD_FAILED · phase: LOADING",
    ]


async def test_up_leaves_a_living_instance_of_that_name_alone(
    cluster: FakeCluster, head: FakeRunner
) -> None:
    head.instances["chat"] = ready(cluster.placement.placement)
    run = await cluster.run("up", MODEL, "--name", "chat", "--json")
    assert run.error["reason"] == "INSTANCE_EXISTS"
    assert (head.started, head.stopped) == ([], [])


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
async def test_an_interrupted_up_stops_what_it_started(
    cluster: FakeCluster, head: FakeRunner, number: signal.Signals, code: int
) -> None:
    head.changes, head.hangs = head.changes[:1], True
    async with cluster.running("up", MODEL, "--name", "chat") as process:
        async with asyncio.timeout(30):
            await head.watching.wait()
        process.send_signal(number)
        run = await ended(process)
    assert run.code == code
    assert head.stopped == ["chat"]
    assert "Traceback" not in run.err


async def test_an_unknown_node_is_refused_with_those_there_are(cluster: FakeCluster) -> None:
    run = await cluster.run("up", MODEL, "--exclude", "cyd")
    assert run.code == 1
    assert "No node is called 'cyd'. Known nodes: ada (" in run.err
    assert cluster.placement.requests == []


async def test_run_starts_asks_and_stops(cluster: FakeCluster, head: FakeRunner) -> None:
    head.parts = answer("Paris", ", of", " course.")
    run = await cluster.run("run", MODEL, "Capital?", "--system", "Be brief.", "--seed", "-7")
    assert (run.code, run.out) == (0, "Paris, of course.\n")
    assert "3 tokens, 10.0 tokens/s, first token after 20 ms" in run.err
    (asked,) = head.asked
    turns = [(turn.role, turn.content) for turn in asked.input.messages.messages]
    assert turns == [("system", "Be brief."), ("user", "Capital?")]
    assert asked.sampling.seed == -7
    assert not asked.sampling.HasField("top_p")
    assert head.started == head.stopped == [asked.instance_id]


async def test_run_keeps_when_told_and_passes_values_unjudged(
    cluster: FakeCluster, head: FakeRunner
) -> None:
    head.parts = answer("x")
    run = await cluster.run(
        *("run", MODEL, "Once", "--keep", "--raw", "--json", "--temperature", "-3"),
        *("--top-p", "2", "--top-k", "-1", "--min-p", "9", "--max-tokens", "-4"),
    )
    assert run.code == 0
    assert set(run.lines[0]) == {"instance"}
    assert run.lines[-2]["text"] == "x"
    assert run.lines[-1]["completion"]["prompt_token_count"] == 5
    (asked,) = head.asked
    assert asked.input.prompt == "Once"
    sampling = asked.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (-3, 2, -1)
    assert (sampling.min_p, asked.max_token_count) == (9, -4)
    assert head.stopped == []


async def test_run_with_every_setting(cluster: FakeCluster, head: FakeRunner) -> None:
    one, other = answer("Paris"), answer("Lyon")
    one[0].logprobs.add().chosen.CopyFrom(runner_pb2.TokenLogprob(text="Paris", logprob=-0.5))
    for part in other:
        part.choice_index = 1
    head.parts = [other[0], *one, other[1]]
    run = await cluster.run(
        *("run", MODEL, "Capital?", "--stop", ";", "--stop", "\n", "--choices", "2"),
        *("--repetition-penalty", "1.5", "--frequency-penalty", "-9", "--presence-penalty", "1"),
        *("--logit-bias", "7=-100", "--logprobs", "0", "--cache-bits", "8"),
        *("--max-cache-tokens", "512"),
    )
    assert (run.code, run.out) == (0, "[1 of 2]\nParis\n[2 of 2]\nLyon\n")
    assert ['"Paris"', "-0.500", "60.7", "%"] in [line.split() for line in run.err.splitlines()]
    assert "1 of 2: 1 token, " in run.err
    (asked,) = head.asked
    assert list(asked.stop.texts) == [";", "\n"]
    assert asked.sampling.frequency_penalty == -9
    assert dict(asked.sampling.logit_bias) == {7: -100}
    assert asked.HasField("top_logprob_count")
    assert (head.options.cache_bits, head.options.max_cache_token_count) == (8, 512)
    refused = await cluster.run("run", MODEL, "Capital?", "--logit-bias", "Paris=1", "--json")
    assert refused.error["metadata"]["field"] == "logit_bias"


async def test_run_uses_a_ready_instance_that_fulfils_the_options(
    cluster: FakeCluster, head: FakeRunner
) -> None:
    head.parts = answer("x")
    head.instances["chat"] = ready(cluster.ring("ada"))
    assert (await cluster.run("run", MODEL, "hi", "--exclude", "bob")).code == 0
    assert [asked.instance_id for asked in head.asked] == ["chat"]
    assert (head.started, head.stopped) == ([], [])
    # One that runs on too few nodes does not do.
    assert (await cluster.run("run", MODEL, "hi", "--min-nodes", "2")).code == 0
    assert len(head.started) == len(head.stopped) == 1


async def test_run_stops_its_instance_when_the_answer_breaks_off(
    cluster: FakeCluster, head: FakeRunner
) -> None:
    head.parts = answer("Par")[:1]
    head.generate_error = ShardringError(
        Reason.INSTANCE_FAILED,
        "Rank 1 went away.",
        metadata={"rank": 1, "sent_token_count": 1},
    )
    run = await cluster.run("run", MODEL, "hi")
    assert (run.code, run.out) == (1, "Par\n")
    assert "Rank 1 went away.\nINSTANCE_FAILED · rank: 1 · sent_token_count: 1" in run.err
    assert head.stopped == head.started


async def test_an_interrupted_generation_is_cancelled(
    cluster: FakeCluster, head: FakeRunner
) -> None:
    head.instances["chat"] = ready(cluster.placement.placement)
    head.parts = answer("Par")[:1]
    async with cluster.running("generate", "chat", "hi") as process:
        async with asyncio.timeout(30):
            await head.generating.wait()
            assert process.stdout is not None
            assert await process.stdout.readexactly(3) == b"Par"
        process.send_signal(signal.SIGINT)
        run = await ended(process)
        async with asyncio.timeout(10):
            await head.generate_cancelled.wait()
    assert (run.code, run.err.strip()) == (130, "")
    assert head.stopped == []


async def test_generate_without_a_template_takes_the_prompt_as_it_is(
    cluster: FakeCluster, head: FakeRunner
) -> None:
    head.instances["chat"] = ready(cluster.placement.placement)
    head.instances["chat"].has_chat_template = False
    head.parts = answer("x\n")
    run = await cluster.run("generate", "chat", "hi")
    assert run.out == "x\n"
    assert head.asked[0].input.prompt == "hi"
    run = await cluster.run("generate", "chat", "hi", "--system", "Be brief.", "--json")
    assert run.error["reason"] == "INVALID_FIELD"


async def test_generate_on_an_unknown_instance_says_what_runs(
    cluster: FakeCluster, head: FakeRunner
) -> None:
    head.instances["chat"] = ready(cluster.placement.placement)
    run = await cluster.run("generate", "chatt", "hi")
    assert run.code == 1
    assert "No node knows an instance 'chatt'. Running: chat." in run.err


async def test_down_stops_what_it_knows(cluster: FakeCluster, head: FakeRunner) -> None:
    head.instances["chat"] = ready(cluster.placement.placement)
    run = await cluster.run("down", "nix", "chat")
    assert (run.code, run.out) == (1, "chat is STOPPED\n")
    assert "INSTANCE_NOT_FOUND" in run.err
    assert head.stopped == ["chat"]
    run = await cluster.run("down", "chat", "--json")
    assert run.document["instances"][0]["state"] == "INSTANCE_STATE_STOPPED"


async def test_down_without_the_head_asks_another_rank(cluster: FakeCluster) -> None:
    bob = cluster.nodes["bob"].runner
    bob.instances["chat"] = ready(cluster.placement.placement, rank=1)
    await cluster.nodes["ada"].server.stop()
    run = await cluster.run("down", "chat")
    assert (run.code, bob.stopped) == (0, ["chat"])


def _download(
    cluster: FakeCluster,
    name: str,
    state: downloads_pb2.DownloadState.ValueType,
    downloaded: int = 0,
    message: str = "",
) -> downloads_pb2.Download:
    error = common_pb2.Error(reason="DISK_FULL", message=message) if message else None
    return downloads_pb2.Download(
        download_id=f"d-{name}",
        node_id=cluster.nodes[name].node.node_id,
        model_id=MODEL,
        state=state,
        downloaded_bytes=downloaded,
        total_bytes=1000,
        error=error,
    )


def _script(cluster: FakeCluster, name: str, *steps: downloads_pb2.Download) -> None:
    cluster.downloads.steps[cluster.nodes[name].node.node_id] = list(steps)


async def test_download_to_all_nodes(cluster: FakeCluster) -> None:
    for name in ("ada", "bob"):
        _script(
            cluster,
            name,
            _download(cluster, name, downloads_pb2.DOWNLOAD_STATE_PENDING),
            _download(cluster, name, downloads_pb2.DOWNLOAD_STATE_ONGOING, 500),
            _download(cluster, name, downloads_pb2.DOWNLOAD_STATE_COMPLETED, 1000),
        )
    run = await cluster.run("download", MODEL)
    assert run.code == 0
    assert run.out.splitlines() == [
        "ada: COMPLETED 100 % of 1.0 kB",
        "bob: COMPLETED 100 % of 1.0 kB",
    ]
    assert "ada: ONGOING 50 % of 1.0 kB" in run.err


async def test_download_that_was_there_needs_no_watch(cluster: FakeCluster) -> None:
    there = _download(cluster, "ada", downloads_pb2.DOWNLOAD_STATE_COMPLETED, 1000)
    _script(cluster, "ada", there)
    run = await cluster.run("download", MODEL, "--node", "ada", "--json")
    assert run.code == 0
    assert [line["downloads"][0]["state"] for line in run.lines] == ["DOWNLOAD_STATE_COMPLETED"]


async def test_download_says_where_and_why_it_failed(cluster: FakeCluster) -> None:
    _script(
        cluster,
        "ada",
        _download(cluster, "ada", downloads_pb2.DOWNLOAD_STATE_ONGOING),
        _download(cluster, "ada", downloads_pb2.DOWNLOAD_STATE_FAILED, 10, "The disk is full."),
    )
    run = await cluster.run("download", MODEL)  # bob has no worker
    assert run.code == 1
    assert run.err.splitlines()[-3:] == [
        "ada: The disk is full.",
        "bob: No worker is attached there.",
        "DOWNLOAD_FAILED",
    ]


async def test_a_watch_that_ends_early_is_an_error(cluster: FakeCluster, head: FakeRunner) -> None:
    head.changes = head.changes[:1]
    run = await cluster.run("up", MODEL, "--name", "chat", "--json")
    assert (run.code, run.error["reason"]) == (1, "SHUTTING_DOWN")
    assert head.stopped == ["chat"]


async def test_an_interrupted_download_cancels_only_its_own(cluster: FakeCluster) -> None:
    for name in ("ada", "bob"):
        _script(cluster, name, _download(cluster, name, downloads_pb2.DOWNLOAD_STATE_ONGOING))
    cluster.downloads.earlier = [_download(cluster, "bob", downloads_pb2.DOWNLOAD_STATE_ONGOING)]
    async with cluster.running("download", MODEL) as process:
        async with asyncio.timeout(30):
            await cluster.downloads.watched.wait()
        process.send_signal(signal.SIGINT)
        run = await ended(process)
    assert run.code == 130
    assert cluster.downloads.cancelled == ["d-ada"]
