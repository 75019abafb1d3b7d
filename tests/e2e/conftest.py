"""A real cluster on this machine: hub, three services, three nodes, a span collector."""

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from services.cli.lab import Lab
from services.cli.spans import SpanCollector

MODELS = Path(__file__).parents[2] / "models"
NODES = ("ada", "bob", "cyd")


@pytest.fixture(scope="session")
def hub_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models that are shipped, and some that cannot run."""
    folder = tmp_path_factory.mktemp("hub")
    good = folder / "shardring" / "tiny-facts"
    shutil.copytree(MODELS / "shardring" / "tiny-facts", good)

    weightless = folder / "broken" / "weightless"
    shutil.copytree(good, weightless, ignore=shutil.ignore_patterns("model*"))

    unknown = folder / "broken" / "unknown-architecture"
    shutil.copytree(good, unknown)
    config = json.loads((unknown / "config.json").read_text())
    config |= {"model_type": "abacus", "architectures": ["AbacusForCausalLM"]}
    (unknown / "config.json").write_text(json.dumps(config))
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def collector() -> AsyncIterator[SpanCollector]:
    """Where the cluster's processes export their spans to."""
    collector = SpanCollector()
    await collector.start()
    yield collector
    await collector.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lab(
    hub_folder: Path, collector: SpanCollector, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Lab]:
    """The cluster, each service and node a process of its own."""
    lab = Lab(
        tmp_path_factory.mktemp("lab"),
        environment={
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{collector.address}",
            "OTEL_BSP_SCHEDULE_DELAY": "200",
        },
    )
    try:
        await lab.start_control(hub_folder)
        for name in NODES:
            await lab.start_node(name)
        yield lab
    finally:
        await lab.stop()
