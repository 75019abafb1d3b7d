"""A cluster of three nodes, each a process of its own, and its counts."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from services.cli.lab import Lab
from tests.e2e.client import Client, eventually
from tests.processes import children_with
from tests.soak.counts import Held, held

NODES = ("ada", "bob", "cyd")
MODELS = Path(__file__).parents[2] / "models"


@dataclass(frozen=True)
class Cluster:
    """Three nodes and a client of theirs."""

    lab: Lab
    client: Client
    temporary: Path

    def temporary_files(self) -> set[Path]:
        """Return what its processes have left in their folder for temporary files."""
        return set(self.temporary.rglob("*"))

    def nodes(self) -> dict[str, Held]:
        """Count what each node's process holds."""
        return {name: held(self.lab.processes[name].pid) for name in NODES}

    def shards(self) -> dict[str, psutil.Process]:
        """Return the process of each shard, by its node's name."""
        found = {}
        for name in NODES:
            for child in children_with("services.runner.child", self.lab.processes[name].pid):
                found[name] = child
        return found


@asynccontextmanager
async def cluster() -> AsyncIterator[Cluster]:
    """Start a cluster, and end it."""
    with TemporaryDirectory(prefix="shardring-soak-") as folder:
        temporary = Path(folder) / "tmp"
        temporary.mkdir()
        lab = Lab(Path(folder), environment={"TMPDIR": str(temporary)})
        try:
            await lab.start_control(MODELS)
            for name in NODES:
                await lab.start_node(name)
            client = Client(lab)
            await client.node_ids(*NODES)
            running = Cluster(lab, client, temporary)
            # Nodes measure themselves once while they are idle, in a process of their own.
            await eventually(lambda: len(list(lab.folder.rglob("calibration.json"))) == 3, 300)
            await eventually(lambda: all(not now.children for now in running.nodes().values()))
            yield running
            await client.close()
        finally:
            await lab.stop()
