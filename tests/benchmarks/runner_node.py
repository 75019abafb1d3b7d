"""A node's runner by itself, with children of a given module: for what a lab's node cannot do.

    python -m tests.benchmarks.runner_node NODE_ID CHILD_MODULE MODEL_FOLDER

Says the port that it listens on, on loopback.
"""

import asyncio
import sys
from functools import partial
from pathlib import Path

from services.common.addresses import HostPort
from services.common.server import start_server, until_stopped
from services.common.telemetry import start_telemetry
from services.runner.adapters.child import start_child
from services.runner.app import Runner
from services.runner.bootstrap import registrations
from tests.fakes.files_on_disk import FilesOnDisk


async def _serve(node_id: str, child_module: str, folder: Path) -> None:
    start_telemetry("shardring-node", node_id=node_id)
    starter = partial(start_child, module=child_module)
    runner = Runner(node_id, FilesOnDisk(folder), starter)
    server = await start_server(HostPort("127.0.0.1", 0), registrations(runner))
    print(server.port, flush=True)
    await until_stopped()
    await runner.close("is stopping")
    await server.stop()


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
