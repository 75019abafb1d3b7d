"""What tests of downloads share: a service, a hub over the module's `models`, and workers."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from services.common.addresses import HostPort
from tests.contract.downloads_lab import Lab, downloads_process, lab
from tests.fakes.faulty_hub import FaultyHub


@pytest.fixture(scope="module")
def service() -> Iterator[HostPort]:
    """A downloads service, a process of its own."""
    with downloads_process() as address:
        yield address


@pytest.fixture
async def hub(models: Path) -> AsyncIterator[FaultyHub]:
    """A hub over the folder `models`, a fixture of the module."""
    hub = FaultyHub(models)
    await hub.start()
    yield hub
    hub.faults.stall_after = None
    await hub.stop()


@pytest.fixture
async def here(service: HostPort, hub: FaultyHub, tmp_path: Path) -> AsyncIterator[Lab]:
    """Workers at the service, whose hub this is."""
    async with lab(service, tmp_path, hub.endpoint) as made:
        yield made
