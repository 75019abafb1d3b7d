"""Metrics, as a collector gets them from a process by OTLP over gRPC."""

import asyncio
import os
import re
import socket
import sys
from pathlib import Path

from opentelemetry.proto.metrics.v1 import metrics_pb2

from tests.fakes.metrics_collector import MetricsCollector, metrics_collector

CHAT = {"gen_ai.request.model": "org/m", "shardring.instance.id": "chat"}
REQUEST = CHAT | {"gen_ai.provider.name": "shardring"}


async def measured(**environment: str) -> str:
    """Run a process that measures, to its end; return what it printed."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("OTEL_")}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.fakes.measuring"),
        env=kept | environment,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(60):
            out, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0
    return out.decode().strip()


def points(
    collector: MetricsCollector, name: str
) -> list[tuple[dict[str, str], metrics_pb2.HistogramDataPoint | metrics_pb2.NumberDataPoint]]:
    """Return a metric's points with their attributes."""
    metric = collector.metrics[name]
    data = getattr(metric, metric.WhichOneof("data") or "gauge")
    return [
        ({a.key: a.value.string_value for a in point.attributes}, point)
        for point in data.data_points
    ]


def histogram(
    collector: MetricsCollector, name: str
) -> dict[frozenset[tuple[str, str]], tuple[int, float]]:
    """Return a histogram's count and sum by what is special of a point's attributes."""
    found = {}
    for attributes, point in points(collector, name):
        assert isinstance(point, metrics_pb2.HistogramDataPoint)
        assert attributes.items() >= REQUEST.items()
        special = frozenset(attributes.items() - REQUEST.items())
        found[special] = (point.count, point.sum)
    return found


def special(**values: str) -> frozenset[tuple[str, str]]:
    return frozenset((key.replace("__", "."), value) for key, value in values.items())


CHATTED = special(gen_ai__operation__name="chat")
COMPLETED = special(gen_ai__operation__name="text_completion")


async def test_requests_by_the_conventions_names() -> None:
    async with metrics_collector() as collector:
        await measured(OTEL_EXPORTER_OTLP_ENDPOINT=f"http://{collector.address}")
    assert histogram(collector, "gen_ai.server.request.duration") == {
        CHATTED | special(shardring__finish_reason="stop"): (1, 2.5),
        COMPLETED | special(shardring__finish_reason="stop"): (1, 2.5),
        COMPLETED | special(error__type="INSTANCE_FAILED"): (1, 0.25),
        COMPLETED | special(shardring__finish_reason="cancelled"): (1, 0.5),
    }
    # Not of the one that failed, and per token not of the one that had but one.
    assert histogram(collector, "gen_ai.server.time_to_first_token") == {
        CHATTED: (1, 0.5),
        COMPLETED: (2, 1.0),
    }
    assert histogram(collector, "gen_ai.server.time_per_output_token") == {
        CHATTED: (1, 0.5),
        COMPLETED: (1, 0.5),
    }
    assert histogram(collector, "gen_ai.client.token.usage") == {
        CHATTED | special(gen_ai__token__type="input"): (1, 20),
        CHATTED | special(gen_ai__token__type="output"): (1, 5),
        COMPLETED | special(gen_ai__token__type="input"): (2, 40),
        COMPLETED | special(gen_ai__token__type="output"): (2, 6),
    }
    assert histogram(collector, "shardring.request.queue_time") == {
        CHATTED: (1, 0.25),
        COMPLETED: (2, 0.5),
    }
    hits = {frozenset(a.items() - REQUEST.items()): p.as_int for a, p in points_of_hits(collector)}
    assert hits == {CHATTED: 8, COMPLETED: 8}
    usage = collector.metrics["gen_ai.client.token.usage"].histogram.data_points[0]
    assert usage.explicit_bounds[:3] == [1, 4, 16], "the conventions' own buckets"


def points_of_hits(
    collector: MetricsCollector,
) -> list[tuple[dict[str, str], metrics_pb2.NumberDataPoint]]:
    return [
        (attributes, point)
        for attributes, point in points(collector, "shardring.prefix_cache.hits")
        if isinstance(point, metrics_pb2.NumberDataPoint)
    ]


async def test_what_instances_do_and_what_this_nodes_shards_spend() -> None:
    async with metrics_collector() as collector:
        await measured(OTEL_EXPORTER_OTLP_METRICS_ENDPOINT=f"http://{collector.address}")

    def gauge(name: str) -> list[tuple[dict[str, str], float]]:
        found = []
        for attributes, point in points(collector, name):
            assert isinstance(point, metrics_pb2.NumberDataPoint)
            found.append((attributes, point.as_double or point.as_int))
        return found

    # The head alone speaks for an instance.
    assert gauge("shardring.request.running") == [(CHAT, 3)]
    assert gauge("shardring.request.queued") == [(CHAT, 1)]
    assert gauge("shardring.batch.occupancy") == [(CHAT, 2.5)]
    mine = CHAT | {"shardring.rank": "0"}
    other = mine | {"shardring.instance.id": "far", "shardring.rank": "1"}
    for name, value in {
        "shardring.stage.utilization": 0.5,
        "shardring.kv_cache.usage": 1000,
        "shardring.kv_cache.limit": 4000,
        "shardring.prefix_cache.usage": 300,
        "shardring.memory.usage": 9000,
    }.items():
        assert gauge(name) == [(mine, value), (other, value)], name
    (resource,) = collector.resources
    assert resource["service.name"] == "shardring-node"
    assert resource["shardring.node_name"] == "n0"
    for name, metric in collector.metrics.items():
        assert metric.unit, name
        assert metric.description.endswith("."), name


async def test_the_documents_name_every_metric() -> None:
    async with metrics_collector() as collector:
        await measured(OTEL_EXPORTER_OTLP_ENDPOINT=f"http://{collector.address}")
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    named = re.findall(r"^\| `([a-z_.]+)` \| (?:histogram|counter|gauge), ", page, re.MULTILINE)
    assert sorted(named) == sorted(collector.metrics)


async def test_nothing_is_measured_for_nobody() -> None:
    assert await measured() == "[]"
    async with metrics_collector() as collector:
        endpoint = f"http://{collector.address}"
        off = await measured(OTEL_EXPORTER_OTLP_ENDPOINT=endpoint, OTEL_METRICS_EXPORTER="none")
        assert off == "[]"
        traces = await measured(OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=endpoint)
        assert traces == "[]"
        await measured(OTEL_EXPORTER_OTLP_ENDPOINT=endpoint, OTEL_SDK_DISABLED="true")
        assert collector.metrics == {}


async def test_a_process_ends_though_its_collector_says_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        await measured(OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{port}")
