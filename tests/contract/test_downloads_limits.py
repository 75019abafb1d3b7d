"""What bounds downloads: who wants them, the room on the disk, files at a time, bytes a second."""

import asyncio
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from services.downloads.worker.budget import Budget
from services.downloads.worker.fetch import fetch
from services.downloads.worker.protocol import Fault, FetchJob, FileOrder
from shardring.downloads.v1 import downloads_pb2
from shardring.downloads.v1 import downloads_service_pb2 as pb
from tests.contract.downloads_lab import Lab, eventually
from tests.fakes.faulty_hub import FaultyHub
from tests.fakes.tiny_model import write_model

MODEL = "org/big"
OTHER = "org/other"
MIDDLE = "model-00002-of-00003.safetensors"
LAYER_BYTES = 2**20
DISK_BYTES = 6 * 2**20

ONGOING = downloads_pb2.DOWNLOAD_STATE_ONGOING
COMPLETED = downloads_pb2.DOWNLOAD_STATE_COMPLETED
FAILED = downloads_pb2.DOWNLOAD_STATE_FAILED
CANCELLED = downloads_pb2.DOWNLOAD_STATE_CANCELLED


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder / MODEL, layer_bytes=LAYER_BYTES)
    write_model(folder / OTHER, layer_bytes=LAYER_BYTES + 2)
    return folder


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of DISK_BYTES."""
    if os.geteuid() != 0 or not Path("/proc/filesystems").exists():
        pytest.skip("mounting a small file system takes root on Linux")
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("this root may not mount anything")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


async def start(here: Lab, node: str, instance_id: str) -> downloads_pb2.Download:
    request = pb.StartDownloadRequest(node_id=node, model_id=MODEL, instance_id=instance_id)
    return (await here.remote.unary(here.stub.StartDownload, request, timeout=10)).download


async def cancel(here: Lab, download_id: str, instance_id: str = "") -> int:
    """Cancel, or withdraw an instance's wish; return the state that leaves it in."""
    request = pb.CancelDownloadRequest(download_id=download_id, instance_id=instance_id)
    response = await here.remote.unary(here.stub.CancelDownload, request, timeout=5)
    return response.download.state


async def stalled_start(here: Lab, hub: FaultyHub, node: str, instance_id: str = "") -> str:
    """Begin a download that stands still with every weight file begun; return its id."""
    hub.faults.stall_after = LAYER_BYTES // 2
    download = await start(here, node, instance_id)

    async def begun() -> bool:
        now = await here.get(download.download_id)
        return now.state == ONGOING and now.downloaded_bytes > 3 * LAYER_BYTES // 4

    await eventually(begun)
    return download.download_id


async def test_a_download_goes_on_while_anybody_wants_it(here: Lab, hub: FaultyHub) -> None:
    node = await here.worker()
    download_id = await stalled_start(here, hub, node, "i-1")
    assert (await start(here, node, "i-2")).download_id == download_id
    assert (await start(here, node, "i-2")).download_id == download_id
    assert await cancel(here, download_id, "i-1") == ONGOING
    assert await cancel(here, download_id, "i-1") == ONGOING
    assert await cancel(here, download_id, "i-unknown") == ONGOING
    assert await cancel(here, download_id, "i-2") == CANCELLED
    # A person's wish outlives every instance's, and ends all.
    download_id = await stalled_start(here, hub, node)
    assert (await start(here, node, "i-3")).download_id == download_id
    assert await cancel(here, download_id, "i-3") == ONGOING
    assert (await start(here, node, "i-3")).download_id == download_id
    assert await cancel(here, download_id) == CANCELLED
    # Who starts it anew is the only one to want it.
    download_id = await stalled_start(here, hub, node, "i-4")
    assert await cancel(here, download_id, "i-4") == CANCELLED


async def test_a_disk_that_fills_up_meanwhile_is_told_and_gone_on_with(
    here: Lab, hub: FaultyHub, models: Path, small_disk: Path
) -> None:
    here.folder = small_disk
    node = await here.worker()
    download_id = await stalled_start(here, hub, node)
    with (small_disk / "ballast").open("wb") as ballast:
        ballast.write(bytes(3 * 2**20))
    failed = (await here.watch(download_id))[-1]
    assert (failed.state, failed.error.reason) == (FAILED, "DISK_FULL")
    left = failed.total_bytes - failed.downloaded_bytes
    assert int(failed.error.metadata["needed_bytes"]) == left
    assert int(failed.error.metadata["available_bytes"]) < left
    assert failed.downloaded_bytes >= LAYER_BYTES // 2

    again = await here.fetch(node, MODEL)
    assert (again.state, again.error.reason) == (FAILED, "DISK_FULL")
    (small_disk / "ballast").unlink()
    hub.faults.stall_after = None
    hub.seen.clear()
    done = await here.fetch(node, MODEL)
    assert done.state == COMPLETED, done.error
    # What was kept is not fetched again.
    assert any(request.range for request in hub.asked("body"))
    assert done.received_from_hub_bytes < done.total_bytes
    for file in done.files:
        found = (Path(done.snapshot_path) / file.name).read_bytes()
        assert found == (models / MODEL / file.name).read_bytes()


async def test_what_other_downloads_will_write_is_spoken_for(
    here: Lab, hub: FaultyHub, small_disk: Path
) -> None:
    here.folder = small_disk
    node = await here.worker()
    download_id = await stalled_start(here, hub, node)
    other = await here.fetch(node, OTHER)
    assert (other.state, other.error.reason) == (FAILED, "DISK_FULL")
    # The one that fits is not disturbed; layers of the same model need no room twice.
    part = await here.start(node, MODEL, layers=(1, 2))
    hub.faults.stall_after = None
    assert (await here.watch(download_id))[-1].state == COMPLETED
    assert (await here.watch(part.download_id))[-1].state == COMPLETED


async def test_writing_to_a_full_disk_keeps_what_fits(
    hub: FaultyHub, models: Path, small_disk: Path
) -> None:
    url = f"{hub.endpoint}/api/models/{MODEL}/revision/main?blobs=True"
    listed = (await asyncio.to_thread(httpx2.get, url)).json()
    (file,) = [file for file in listed["siblings"] if file["rfilename"] == MIDDLE]
    order = FileOrder(MIDDLE, file["size"], file["lfs"]["sha256"])
    job = FetchJob(
        model_id=MODEL,
        commit=listed["sha"],
        endpoint=hub.endpoint,
        token=None,
        cache_dir=str(small_disk),
        storage=str(small_disk / "models--org--big"),
        parallel_files=1,
    )
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(DISK_BYTES - LAYER_BYTES))
    with httpx2.Client() as client:
        full = await asyncio.to_thread(fetch, job, order, client, Budget())
        assert (full.fault, full.reason) == (Fault.LOCAL, "DISK_FULL")
        assert LAYER_BYTES // 2 < full.kept_bytes < file["size"]
        ballast.unlink()
        whole = await asyncio.to_thread(fetch, job, order, client, Budget())
    assert whole.fault is None, whole
    assert whole.received_bytes == file["size"] - full.kept_bytes
    found = Path(job.storage) / "snapshots" / job.commit / MIDDLE
    assert found.read_bytes() == (models / MODEL / MIDDLE).read_bytes()


async def test_as_many_files_at_a_time_as_allowed_over_all_downloads(
    here: Lab, hub: FaultyHub
) -> None:
    node = await here.worker(parallel_files=2)
    hub.faults.stall_after = LAYER_BYTES // 2
    one, two = await here.start(node, MODEL), await here.start(node, OTHER)

    async def stuck() -> bool:
        states = [(await here.get(download.download_id)).state for download in (one, two)]
        return states == [ONGOING, ONGOING] and len(hub.asked("body")) >= 2

    await eventually(stuck)
    under_way = [
        file.name
        for download in (one, two)
        for file in (await here.get(download.download_id)).files
        if 0 < file.downloaded_bytes < file.total_bytes
    ]
    assert len(under_way) <= 2
    assert len(hub.asked("body")) == 2
    hub.faults.stall_after = None
    for download in (one, two):
        assert (await here.watch(download.download_id))[-1].state == COMPLETED


async def test_one_download_does_not_starve_another(here: Lab, hub: FaultyHub) -> None:
    node = await here.worker(parallel_files=1)
    hub.faults.bytes_per_second = 8 * 2**20
    one, two = await here.start(node, MODEL), await here.start(node, OTHER)
    first = (await here.watch(two.download_id))[-1]
    assert first.state == COMPLETED
    assert (await here.watch(one.download_id))[-1].state == COMPLETED
    names = [(request.commit, request.name) for request in hub.asked("body")]
    commits = [commit for commit, _ in names]
    # They took turns: neither had all its weights before the other had any.
    assert len(set(commits[:4])) == 2, names


async def test_a_download_waits_for_its_hub_for_so_long_and_no_longer(
    here: Lab, hub: FaultyHub
) -> None:
    node = await here.worker(patience_seconds=2.0)
    hub.refuse("body", 503, 1000)
    started = await here.start(node, MODEL)
    history = await here.watch(started.download_id)
    assert (history[-1].state, history[-1].error.reason) == (FAILED, "HUB_UNREACHABLE")
    assert {entry.state for entry in history} >= {ONGOING}
    names = [request.name for request in hub.asked("body")]
    assert 3 < len(names) <= 3 * 4


async def test_a_download_that_waits_as_told_is_cancelled_at_once(
    here: Lab, hub: FaultyHub
) -> None:
    node = await here.worker()
    hub.refuse("body", 429, 1000, headers=lambda: {"Retry-After": "600"})
    download = await here.start(node, MODEL)

    async def told() -> bool:
        return len(hub.asked("body")) >= 1

    await eventually(told)
    assert (await here.get(download.download_id)).state == ONGOING
    assert await cancel(here, download.download_id) == CANCELLED
    # Those that were under way, and nothing after it was told.
    assert len(hub.asked("body")) <= 3


async def test_no_faster_than_allowed_over_all_downloads(here: Lab, hub: FaultyHub) -> None:
    node = await here.worker(bytes_per_second=4 * 2**20)
    began = time.monotonic()
    ended = await asyncio.gather(here.fetch(node, MODEL), here.fetch(node, OTHER))
    elapsed = time.monotonic() - began
    assert [done.state for done in ended] == [COMPLETED, COMPLETED]
    received = sum(done.received_from_hub_bytes for done in ended)
    # A little may come at once, at the start and when a share changes.
    assert elapsed >= 0.8 * received / (4 * 2**20)
