"""Weights get onto a node's disk: whole, by stage, again after every kind of interruption."""

import asyncio
import shutil
import sys
from pathlib import Path

import pytest
from huggingface_hub import HfApi, snapshot_download

from services.common.errors import Reason, ShardringError
from services.downloads.worker.protocol import FetchJob, FileOrder, job_line, order_line
from shardring.downloads.v1 import downloads_pb2
from shardring.downloads.v1 import downloads_service_pb2 as pb
from tests.contract.downloads_lab import Lab, eventually
from tests.fakes.faulty_hub import FaultyHub
from tests.fakes.tiny_model import write_model
from tests.processes import children_with

TINY_FACTS = "shardring/tiny-facts"
MODEL = "org/model"
BIG = "org/big"
BIG_LAYER_BYTES = 3 * 2**20
MIDDLE = "model-00002-of-00003.safetensors"

PENDING = downloads_pb2.DOWNLOAD_STATE_PENDING
ONGOING = downloads_pb2.DOWNLOAD_STATE_ONGOING
COMPLETED = downloads_pb2.DOWNLOAD_STATE_COMPLETED
FAILED = downloads_pb2.DOWNLOAD_STATE_FAILED
CANCELLED = downloads_pb2.DOWNLOAD_STATE_CANCELLED


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder / MODEL)
    write_model(folder / BIG, layer_bytes=BIG_LAYER_BYTES)
    real = Path(__file__).parents[2] / "models" / TINY_FACTS
    shutil.copytree(real, folder / TINY_FACTS)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


async def stalled_download(here: Lab, hub: FaultyHub, node: str) -> str:
    """Begin a download of the middle layers that stops after 2 MiB of its weights."""
    hub.faults.stall_after = 2 * 2**20
    download = await here.start(node, BIG, layers=(1, 3))
    await asyncio.wait_for(hub.stalled.wait(), 20)

    async def some_on_disk() -> bool:
        now = await here.get(download.download_id)
        # All that is small is whole; the weights stand still.
        left = [file.name for file in now.files if file.downloaded_bytes < file.total_bytes]
        return now.downloaded_bytes > 2**20 and left == [MIDDLE]

    await eventually(some_on_disk)
    return download.download_id


async def test_a_whole_model_arrives_and_other_tools_find_it(
    here: Lab, hub: FaultyHub, models: Path
) -> None:
    node = await here.worker()
    started = await here.start(node, TINY_FACTS)
    assert started.state == PENDING
    history = await here.watch(started.download_id)
    done = history[-1]
    assert done.state == COMPLETED
    assert done.downloaded_bytes == done.total_bytes == sum(f.total_bytes for f in done.files)
    seen = [entry.downloaded_bytes for entry in history]
    assert seen == sorted(seen)
    assert all(0 <= entry.downloaded_bytes <= entry.total_bytes for entry in history)

    fetched = contents(Path(done.snapshot_path))
    source = contents(models / TINY_FACTS)
    assert fetched == {name: source[name] for name in source if name != "README.md"}
    found = snapshot_download(
        TINY_FACTS,
        cache_dir=here.cache(node),
        endpoint=hub.endpoint,
        local_files_only=True,
        allow_patterns=["*.json", "*.safetensors", "*.jinja"],
    )
    assert found == done.snapshot_path

    fraction = await here.fraction(node, TINY_FACTS)
    assert (fraction.fraction, fraction.state) == (1.0, COMPLETED)
    assert fraction.total_bytes == done.total_bytes
    assert (await here.fraction(node, TINY_FACTS, done.commit)).fraction == 1.0
    assert (await here.fraction(node, TINY_FACTS, "other")).fraction == 0.0


async def test_a_stage_gets_its_files_and_a_wider_one_only_what_is_missing(
    here: Lab, hub: FaultyHub
) -> None:
    node = await here.worker()
    done = await here.fetch(node, MODEL, layers=(1, 2))
    weights = {file.name for file in done.files if file.name.endswith(".safetensors")}
    assert weights == {MIDDLE}
    snapshot = Path(done.snapshot_path)
    names = set(contents(snapshot))
    assert names == {
        MIDDLE,
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "model.safetensors.index.json",
    }
    part = await here.fraction(node, MODEL)
    assert part.state == PENDING
    assert part.downloaded_bytes == done.total_bytes
    assert part.fraction == pytest.approx(done.total_bytes / part.total_bytes)

    hub.seen.clear()
    wider = await here.fetch(node, MODEL, layers=(1, 4))
    assert hub.fetched() == {"model-00003-of-00003.safetensors"}
    assert wider.download_id != done.download_id
    whole = await here.fetch(node, MODEL)
    assert set(contents(snapshot)) > names
    assert whole.commit == done.commit
    assert (await here.fraction(node, MODEL)).state == COMPLETED


async def test_starting_twice_is_one_download(here: Lab, hub: FaultyHub) -> None:
    node = await here.worker()
    download_id = await stalled_download(here, hub, node)
    again = await asyncio.gather(*(here.start(node, BIG, layers=(1, 3)) for _ in range(3)))
    commit = (await here.get(download_id)).commit
    pinned = await here.start(node, BIG, layers=(1, 3), revision=commit)
    assert {download.download_id for download in [*again, pinned]} == {download_id}
    other = await here.start(node, BIG, layers=(1, 2))
    assert other.download_id != download_id

    hub.faults.stall_after = None
    assert (await here.watch(download_id))[-1].state == COMPLETED
    pinned = await here.start(node, BIG, layers=(1, 3), revision=commit)
    assert (pinned.download_id, pinned.state) == (download_id, COMPLETED)
    by_branch = await here.fetch(node, BIG, layers=(1, 3))
    assert (by_branch.download_id, by_branch.state) == (download_id, COMPLETED)


async def test_cancel_keeps_what_was_fetched_and_a_new_start_goes_on(
    here: Lab, hub: FaultyHub, models: Path
) -> None:
    node = await here.worker()
    download_id = await stalled_download(here, hub, node)
    response = await here.remote.unary(
        here.stub.CancelDownload, pb.CancelDownloadRequest(download_id=download_id), timeout=5
    )
    cancelled = response.download
    assert cancelled.state == CANCELLED
    assert 2**20 < cancelled.downloaded_bytes < cancelled.total_bytes
    assert children_with("worker.fetch") == []
    (partial,) = here.cache(node).rglob("blobs/*.incomplete")
    kept = partial.stat().st_size
    again = await here.remote.unary(
        here.stub.CancelDownload, pb.CancelDownloadRequest(download_id=download_id), timeout=5
    )
    assert again.download.state == CANCELLED

    hub.faults.stall_after = None
    hub.seen.clear()
    done = await here.fetch(node, BIG, layers=(1, 3))
    assert (done.state, done.download_id != download_id) == (COMPLETED, True)
    assert [s.range for s in hub.seen if s.method == "GET"] == [f"bytes={kept}-"]
    fetched = (Path(done.snapshot_path) / MIDDLE).read_bytes()
    assert fetched == (models / BIG / MIDDLE).read_bytes()


async def test_a_killed_fetching_process_is_a_failure_to_resume_from(
    here: Lab, hub: FaultyHub, models: Path
) -> None:
    node = await here.worker()
    download_id = await stalled_download(here, hub, node)
    (child,) = children_with("worker.fetch")
    child.kill()
    failed = (await here.watch(download_id))[-1]
    assert (failed.state, failed.error.reason) == (FAILED, "DOWNLOAD_FAILED")
    assert failed.downloaded_bytes > 2**20
    hub.faults.stall_after = None
    done = await here.fetch(node, BIG, layers=(1, 3))
    fetched = (Path(done.snapshot_path) / MIDDLE).read_bytes()
    assert fetched == (models / BIG / MIDDLE).read_bytes()


async def test_partial_files_count_right_after_a_restart(here: Lab, hub: FaultyHub) -> None:
    node = await here.worker()
    download_id = await stalled_download(here, hub, node)
    await here.stop_worker(node)
    assert (await here.fraction(node, BIG)).fraction == 0.0
    await here.worker(node_id=node)
    fraction = await here.fraction(node, BIG)
    assert 2**20 < fraction.downloaded_bytes < fraction.total_bytes
    assert 0 < fraction.fraction < 1
    # It goes on by itself under its id, as nobody took it back.
    hub.faults.stall_after = None
    assert (await here.watch(download_id))[-1].state == COMPLETED


@pytest.mark.parametrize("fault", ["cut", "503", "no ranges", "wrong byte"])
async def test_a_faulty_hub_costs_time_not_the_download(
    here: Lab, hub: FaultyHub, models: Path, fault: str
) -> None:
    node = await here.worker()
    download_id = await stalled_download(here, hub, node)
    await here.remote.unary(
        here.stub.CancelDownload, pb.CancelDownloadRequest(download_id=download_id), timeout=5
    )
    hub.faults.stall_after = None
    match fault:
        case "cut":
            hub.faults.cut_after, hub.faults.cuts = 2**20, 1
        case "503":
            hub.faults.errors = 1
        case "no ranges":
            hub.faults.ignore_range = True
        case "wrong byte":
            hub.faults.spoil_byte = True
    done = await here.fetch(node, BIG, layers=(1, 3))
    assert done.state == COMPLETED
    fetched = (Path(done.snapshot_path) / MIDDLE).read_bytes()
    assert fetched == (models / BIG / MIDDLE).read_bytes()


async def test_a_hub_that_restarts_is_waited_for(here: Lab, hub: FaultyHub, models: Path) -> None:
    node = await here.worker()
    download_id = await stalled_download(here, hub, node)
    hub.faults.stall_after = None
    await hub.stop()
    await hub.start()
    done = (await here.watch(download_id))[-1]
    assert done.state == COMPLETED
    fetched = (Path(done.snapshot_path) / MIDDLE).read_bytes()
    assert fetched == (models / BIG / MIDDLE).read_bytes()


@pytest.mark.parametrize("code", [401, 403])
async def test_a_hub_that_refuses_is_not_asked_again(here: Lab, hub: FaultyHub, code: int) -> None:
    node = await here.worker()
    hub.faults.errors, hub.faults.error_code = 99, code
    failed = await here.fetch(node, BIG, layers=(1, 3))
    assert (failed.state, failed.error.reason) == (FAILED, "MODEL_ACCESS_DENIED")
    assert "HF_TOKEN" in failed.error.message
    assert hub.faults.errors == 98


async def test_the_fetching_process_ends_with_its_worker(hub: FaultyHub, tmp_path: Path) -> None:
    hub.faults.stall_after = 2**20
    sha = (await asyncio.to_thread(HfApi(endpoint=hub.endpoint).model_info, BIG)).sha
    job = FetchJob(
        model_id=BIG,
        commit=str(sha),
        endpoint=hub.endpoint,
        token=None,
        cache_dir=str(tmp_path),
        storage=str(tmp_path / "models--org--big"),
        parallel_files=1,
    )
    order = FileOrder(MIDDLE, (hub.folder / BIG / MIDDLE).stat().st_size, etag="")
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "services.downloads.worker.fetch",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert child.stdin is not None
    child.stdin.write(f"{job_line(job)}\n{order_line(order)}\n".encode())
    await asyncio.wait_for(hub.stalled.wait(), 20)
    # As when the worker is killed: the pipe closes.
    child.stdin.close()
    assert await asyncio.wait_for(child.wait(), 10) == 1


async def test_a_truncated_file_is_not_complete_and_is_fetched_anew(
    here: Lab, models: Path
) -> None:
    node = await here.worker()
    done = await here.fetch(node, MODEL)
    file = Path(done.snapshot_path) / MIDDLE
    for spoiled in (file.read_bytes()[:-1], b""):
        file.resolve().write_bytes(spoiled)

        async def noticed() -> bool:
            return (await here.fraction(node, MODEL)).state != COMPLETED

        await eventually(noticed)
        again = await here.fetch(node, MODEL)
        assert (again.download_id, again.state) == (done.download_id, COMPLETED)
        assert file.read_bytes() == (models / MODEL / MIDDLE).read_bytes()


async def test_with_the_hub_down_what_is_on_disk_works_and_the_rest_is_named(
    here: Lab, hub: FaultyHub
) -> None:
    node = await here.worker()
    done = await here.fetch(node, MODEL)
    part = await here.fetch(node, BIG, layers=(3, 4))
    await hub.stop()
    await here.stop_worker(node)
    await here.worker(node_id=node)

    assert (await here.fraction(node, MODEL)).state == COMPLETED
    offline = await here.fetch(node, MODEL)
    assert (offline.state, offline.snapshot_path) == (COMPLETED, done.snapshot_path)
    # The facts cover layers whose files are not here.
    assert len((await here.model(BIG)).layer_bytes) == 4
    assert (await here.fetch(node, BIG, layers=(3, 4))).state == COMPLETED
    rest = await here.fetch(node, BIG, revision=part.commit)
    assert (rest.state, rest.error.reason) == (FAILED, "HUB_UNREACHABLE")
    assert rest.error.metadata["hub"] == hub.endpoint
    missing = await here.fetch(node, "org/other")
    assert missing.error.reason == "HUB_UNREACHABLE"


@pytest.mark.parametrize("keeps_list", [True, False])
async def test_a_model_that_another_tool_fetched_counts_offline(
    here: Lab, hub: FaultyHub, keeps_list: bool
) -> None:
    cache = here.cache("guest")
    path = await asyncio.to_thread(
        snapshot_download, MODEL, cache_dir=cache, endpoint=hub.endpoint, ignore_patterns=["*.py"]
    )
    if not keeps_list:
        # As huggingface_hub before 2.0 leaves a cache.
        shutil.rmtree(Path(path).parents[1] / "trees")
    await hub.stop()
    node = await here.worker(node_id="guest", offline=True)
    assert (await here.fraction(node, MODEL)).state == COMPLETED
    assert (await here.model(MODEL)).license == "mit"
    assert (await here.fetch(node, MODEL)).snapshot_path == path


async def test_what_other_programs_do_to_the_cache_is_seen(here: Lab, hub: FaultyHub) -> None:
    node = await here.worker()
    assert (await here.fraction(node, MODEL)).total_bytes == 0
    path = await asyncio.to_thread(
        snapshot_download, MODEL, cache_dir=here.cache(node), endpoint=hub.endpoint
    )

    async def there() -> bool:
        return (await here.fraction(node, MODEL)).state == COMPLETED

    async def gone() -> bool:
        return (await here.fraction(node, MODEL)).downloaded_bytes == 0

    await eventually(there)
    shutil.rmtree(Path(path).parents[1])
    await eventually(gone)


async def test_delete_frees_the_disk_but_not_under_a_download(here: Lab, hub: FaultyHub) -> None:
    node = await here.worker()
    await stalled_download(here, hub, node)
    await here.fetch(node, MODEL)

    async def delete(model_id: str) -> int:
        request = pb.DeleteModelRequest(node_id=node, model_id=model_id)
        response = await here.remote.unary(here.stub.DeleteModel, request, timeout=10)
        return response.freed_bytes

    with pytest.raises(ShardringError) as in_use:
        await delete(BIG)
    assert in_use.value.reason is Reason.MODEL_IN_USE
    total = (await here.fraction(node, MODEL)).total_bytes
    assert await delete(MODEL) >= total
    assert not (here.cache(node) / "models--org--model").exists()
    empty = await here.fraction(node, MODEL)
    assert (empty.fraction, empty.state) == (0.0, downloads_pb2.DOWNLOAD_STATE_UNSPECIFIED)
    with pytest.raises(ShardringError) as missing:
        await delete(MODEL)
    assert missing.value.reason is Reason.MODEL_NOT_FOUND
    assert (await here.fetch(node, MODEL)).state == COMPLETED


async def test_a_full_disk_is_found_out_before(here: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    node = await here.worker()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9, 8, 1))
    failed = await here.fetch(node, MODEL)
    assert (failed.state, failed.error.reason) == (FAILED, "DISK_FULL")
    assert failed.error.metadata["available_bytes"] == "1"
    assert int(failed.error.metadata["needed_bytes"]) == failed.total_bytes
    assert failed.error.metadata["node_id"] == node
