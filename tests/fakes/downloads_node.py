"""A node's downloads worker as a process of its own, to be killed:

python -m tests.fakes.downloads_node NODE_ID SERVICE CACHE_FOLDER HUB_ENDPOINT
"""

import asyncio
import sys
from pathlib import Path

from services.common.addresses import parse_host_port
from services.common.channel import Remote
from services.downloads.worker.options import CacheOptions
from services.downloads.worker.worker import DownloadsWorker


async def main(node_id: str, service: str, cache: str, endpoint: str) -> None:
    """Work until killed."""
    remote = Remote("downloads", [parse_host_port(service)])
    options = CacheOptions(cache_dir=Path(cache), endpoint=endpoint)
    await DownloadsWorker(node_id, remote, options).run()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
