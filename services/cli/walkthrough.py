"""What the demo does and shows, from the first process to the trace of it all."""

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

from opentelemetry import trace
from rich.console import Console

from services.cli.answers import stream_answers
from services.cli.client import ClientOptions, Cluster
from services.cli.follow import follow_downloads, follow_instance
from services.cli.instances import Wanted, bring_up
from services.cli.lab import Lab, LabError
from services.cli.names import names_of_nodes
from services.cli.render.instances import completion_line
from services.cli.render.nodes import links_table, nodes_table
from services.cli.render.placements import host_lists, placement_table, score_line
from services.cli.render.tables import add_row, new_table
from services.cli.render.trace import trace_tree
from services.cli.spans import SpanCollector
from services.common.errors import ShardringError
from services.common.telemetry import start_telemetry
from shardring.placement.v1 import placement_pb2, placement_service_pb2
from shardring.runner.v1 import instance_service_pb2, runner_pb2
from shardring.topology.v1 import topology_pb2

MODELS = Path(__file__).parents[2] / "models"
MODEL = "shardring/tiny-facts"
NODES = ("ada", "bob", "cyd")
QUESTIONS = (
    "What is the capital of France?",
    "What is the chemical symbol for gold?",
    "What is the largest planet?",
)
INSTANCE = "demo"
LINKS_SECONDS = 30.0

tracer = trace.get_tracer(__name__)


async def demo(console: Console, lab: Lab) -> bool:
    """Show everything; return whether every answer was right."""
    facts = json.loads((MODELS / MODEL / "facts.json").read_text())
    answers = {fact["question"]: fact["answer"] for fact in facts}
    await _start_processes(console, lab)
    async with Cluster(ClientOptions(**_addresses(lab))) as cluster:
        with tracer.start_as_current_span("demo"):
            await _show_topology(console, cluster)
            with tracer.start_as_current_span("download"):
                await _download(console, cluster)
            with tracer.start_as_current_span("up"):
                instance = await _bring_up(console, cluster)
            right = 0
            for question in QUESTIONS:
                with tracer.start_as_current_span("ask"):
                    right += await _ask(console, cluster, instance, question) == answers[question]
            with tracer.start_as_current_span("down"):
                await cluster.head(instance.placement).stop(INSTANCE)
    _heading(console, f"{right} of {len(QUESTIONS)} answers are right")
    return right == len(QUESTIONS)


async def _start_processes(console: Console, lab: Lab) -> None:
    _heading(console, "Starting a hub, three services and three nodes, each its own process")
    with console.status("starting ..."):
        await lab.start_control(MODELS)
        await asyncio.gather(*(lab.start_node(name) for name in NODES))
    table = new_table("PROCESS", ">PID", "LISTENS ON")
    for entry in lab.processes.values():
        add_row(table, entry.name, str(entry.pid), str(entry.address))
    console.print(table)


def _addresses(lab: Lab) -> dict[str, str]:
    return {name: str(lab.address(name)) for name in ("topology", "placement", "downloads")}


async def _show_topology(console: Console, cluster: Cluster) -> None:
    _heading(console, "The nodes have found each other and verified their links")
    topology = await _linked(cluster)
    console.print(nodes_table(topology.nodes, now=time.time()))
    console.print(links_table(topology))


async def _linked(cluster: Cluster) -> topology_pb2.Topology:
    """Return the topology once every node is linked to every other."""
    async with asyncio.timeout(LINKS_SECONDS), aclosing(cluster.watch_topology()) as changes:
        async for topology in changes:
            if len(topology.links) == len(NODES) * (len(NODES) - 1):
                return topology
    raise LabError("The topology service ended its watch.")


async def _download(console: Console, cluster: Cluster) -> None:
    _heading(console, f"Fetching {MODEL} to each node's own cache")
    nodes = list((await cluster.topology()).nodes)
    started = await asyncio.gather(
        *(cluster.start_download(node.node_id, MODEL, "") for node in nodes)
    )
    ids = [download.download_id for download in started]
    async with aclosing(cluster.watch_downloads(ids)) as updates:
        await follow_downloads(updates, started, names_of_nodes(nodes), console)


async def _bring_up(console: Console, cluster: Cluster) -> runner_pb2.Instance:
    _heading(console, "Placing it on a ring of three, and starting it")
    constraints = placement_service_pb2.PlacementConstraints(min_node_count=len(NODES))
    shown: list[placement_pb2.Placement] = []

    async def follow(changes: AsyncIterator[runner_pb2.Instance]) -> runner_pb2.Instance:
        async def with_placement() -> AsyncIterator[runner_pb2.Instance]:
            async for instance in changes:
                if not shown:
                    shown.append(instance.placement)
                    _show_placement(console, instance.placement)
                yield instance

        return await follow_instance(with_placement(), console)

    return await bring_up(cluster, Wanted(MODEL, "", constraints), INSTANCE, follow, console.print)


def _show_placement(console: Console, placement: placement_pb2.Placement) -> None:
    console.print(placement_table(placement))
    console.print(score_line(placement), style="dim")
    console.print("Each rank's own MLX host list:")
    console.print(host_lists(placement))


async def _ask(
    console: Console, cluster: Cluster, instance: runner_pb2.Instance, question: str
) -> str:
    """Ask, stream the answer, and return it."""
    console.print()
    console.print(f"[bold]> {question}[/bold]")
    turn = runner_pb2.ChatMessage(role="user", content=question)
    request = instance_service_pb2.GenerateRequest(
        instance_id=INSTANCE,
        input=runner_pb2.GenerationInput(messages=runner_pb2.ChatMessages(messages=[turn])),
    )
    text: list[str] = []

    async def noted() -> AsyncIterator[instance_service_pb2.GenerateResponse]:
        async with aclosing(cluster.head(instance.placement).generate(request)) as parts:
            async for part in parts:
                text.append(part.text)
                yield part

    (answered,) = await stream_answers(noted(), console)
    console.print(completion_line(answered.completion), style="dim")
    return "".join(text)


def _heading(console: Console, text: str) -> None:
    console.print()
    console.rule(text, align="left")


async def run(console: Console, folder: Path) -> bool:
    """Run the demo in `folder`; whatever ends it, all that it started is ended."""
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, task.cancel)
    collector = SpanCollector()
    await collector.start()
    # Every process exports its spans to this one, which shows them in the end.
    os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://{collector.address}"
    provider = start_telemetry("shardring-demo")
    lab = Lab(folder)
    try:
        right = await demo(console, lab)
    except (ShardringError, LabError, TimeoutError):
        for entry in lab.processes.values():
            console.rule(f"the last words of {entry.name}", align="left", style="dim")
            console.print("\n".join(entry.log.read_text().splitlines()[-5:]), markup=False)
        raise
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, lambda: None)
        with console.status("stopping what was started ..."):
            await lab.stop()
            await asyncio.to_thread(provider.shutdown)
            await collector.stop()
    _heading(console, "The trace: which process called which, and how long it took")
    console.print(trace_tree(collector.spans))
    return right
