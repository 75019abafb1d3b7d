"""Verifying what is on a node's disk: what is right, what is corrupt, and when it stops."""

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest

from services.common.addresses import HostPort
from services.common.errors import Reason, ShardringError
from shardring.downloads.v1 import downloads_pb2
from shardring.downloads.v1 import downloads_service_pb2 as pb
from tests.contract.downloads_lab import LIMIT_SECONDS, Lab, eventually, lab
from tests.fakes.faulty_hub import FaultyHub
from tests.fakes.tiny_model import write_model

MODEL, SECOND = "org/model", "org/second"
WEIGHTS = "model-00002-of-00003.safetensors"
COMPLETED = downloads_pb2.DOWNLOAD_STATE_COMPLETED
# Without a byte of its own on disk; reading it takes longer than any test.
ENDLESS_BYTES = 200 * 2**30
COMMIT = "b" * 40


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in ("model", "second"):
        write_model(folder / "org" / name)
    return folder


@pytest.fixture
async def here(service: HostPort, hub: FaultyHub, tmp_path: Path) -> AsyncIterator[Lab]:
    async with lab(service, tmp_path, hub.endpoint) as made:
        # What they find otherwise must not come from looking around meanwhile.
        made.rescan_seconds = 3600
        yield made


async def verify(here: Lab, node: str, model_id: str = MODEL) -> pb.Verification:
    """Return what was found in the end."""
    request = pb.VerifyModelRequest(node_id=node, model_id=model_id)
    stream = here.remote.stream(here.stub.VerifyModel, request)
    async with asyncio.timeout(LIMIT_SECONDS), aclosing(stream):
        async for message in stream:
            assert message.verification.verified_bytes <= message.verification.total_bytes
        return message.verification


async def refusal(here: Lab, node: str, model_id: str = MODEL) -> Reason:
    with pytest.raises(ShardringError) as refused:
        await verify(here, node, model_id)
    return refused.value.reason


async def refusal_of(here: Lab, request: pb.VerifyModelRequest) -> Reason | None:
    """Return why it does not even begin; None when it does, and is left off again."""
    async with aclosing(here.remote.stream(here.stub.VerifyModel, request)) as steps:
        try:
            await anext(steps)
        except ShardringError as error:
            return error.reason
    return None


def storage(here: Lab, node: str, model_id: str = MODEL) -> Path:
    return here.cache(node) / f"models--{model_id.replace('/', '--')}"


def flip(path: Path) -> None:
    """Change the last byte, and nothing that a look at the file would tell."""
    before = path.stat()
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def endless(here: Lab, node: str, model_id: str) -> None:
    """Put a model there that takes for ever to read."""
    snapshot = storage(here, node, model_id) / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    blob = storage(here, node, model_id) / "blobs" / ("e" * 64)
    blob.parent.mkdir()
    with blob.open("wb") as file:
        file.truncate(ENDLESS_BYTES)
    (snapshot / "model.safetensors").symlink_to(blob)


async def test_a_model_as_the_hub_has_it_is_right(here: Lab) -> None:
    node = await here.worker()
    fetched = await here.fetch(node, MODEL)
    found = await verify(here, node)
    assert found.verified_bytes == found.total_bytes == fetched.total_bytes
    assert (list(found.corrupt_files), list(found.unverifiable_files)) == ([], [])
    assert found.done


async def test_what_is_corrupt_is_removed_and_fetched_anew(here: Lab) -> None:
    node = await here.worker()
    fetched = await here.fetch(node, MODEL)
    file = Path(fetched.snapshot_path) / WEIGHTS
    right = file.read_bytes()
    flip(file.resolve())
    found = await verify(here, node)
    assert list(found.corrupt_files) == [WEIGHTS]
    assert not file.is_symlink()

    async def fallen() -> bool:
        fraction = await here.fraction(node, MODEL)
        return fraction.downloaded_bytes == fetched.total_bytes - len(right)

    await eventually(fallen)
    again = await here.fetch(node, MODEL)
    assert (again.state, file.read_bytes()) == (COMPLETED, right)
    assert list((await verify(here, node)).corrupt_files) == []
    assert (await here.fraction(node, MODEL)).fraction == 1


async def test_every_commit_that_shares_a_corrupt_file_loses_it(here: Lab) -> None:
    node = await here.worker()
    first = Path((await here.fetch(node, MODEL)).snapshot_path)
    other = first.parent / COMMIT
    other.mkdir()
    (other / WEIGHTS).symlink_to((first / WEIGHTS).resolve())
    (other / "config.json").symlink_to((first / "config.json").resolve())
    flip((first / WEIGHTS).resolve())
    assert list((await verify(here, node)).corrupt_files) == [WEIGHTS]
    assert [(path / WEIGHTS).is_symlink() for path in (first, other)] == [False, False]
    assert (other / "config.json").exists()


async def test_files_of_other_tools_are_verified_by_the_hub_s_list(
    here: Lab, hub: FaultyHub, models: Path
) -> None:
    """They lie there without links or lists, as copied; README.md is no needed file."""
    node = await here.worker()
    commit = (await here.model(MODEL)).commit
    snapshot = storage(here, node) / "snapshots" / commit
    snapshot.mkdir(parents=True)
    for name in ("config.json", "README.md", WEIGHTS):
        (snapshot / name).write_bytes((models / MODEL / name).read_bytes())
    (snapshot / "own.txt").write_text("x")
    flip(snapshot / WEIGHTS)
    found = await verify(here, node)
    assert (list(found.corrupt_files), list(found.unverifiable_files)) == ([WEIGHTS], ["own.txt"])
    await hub.stop()
    found = await verify(here, node)
    assert list(found.unverifiable_files) == ["README.md", "config.json", "own.txt"]
    assert list(found.corrupt_files) == []


async def test_contents_that_git_names_are_verified_too(here: Lab, hub: FaultyHub) -> None:
    node = await here.worker()
    await hub.stop()
    snapshot = storage(here, node) / "snapshots" / COMMIT
    blobs = storage(here, node) / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for name, content in {"config.json": b"{}", "a.txt": b"", "b.txt": b"wrong"}.items():
        said = b"right" if content == b"wrong" else content
        etag = hashlib.sha1(b"blob %d\0" % len(said) + said, usedforsecurity=False).hexdigest()
        (blobs / etag).write_bytes(content)
        (snapshot / name).symlink_to(blobs / etag)
    found = await verify(here, node)
    assert (list(found.corrupt_files), list(found.unverifiable_files)) == (["b.txt"], [])


async def test_refusals(here: Lab, hub: FaultyHub) -> None:
    node = await here.worker()
    assert await refusal(here, node) is Reason.MODEL_NOT_FOUND
    assert await refusal(here, "n-none") is Reason.WORKER_NOT_ATTACHED
    assert await refusal(here, node, "../x") is Reason.INVALID_FIELD
    hub.faults.stall_after = 0
    started = await here.start(node, MODEL)
    await asyncio.wait_for(hub.stalled.wait(), LIMIT_SECONDS)
    assert await refusal(here, node) is Reason.MODEL_IN_USE
    hub.faults.stall_after = None
    await here.remote.unary(
        here.stub.CancelDownload,
        pb.CancelDownloadRequest(download_id=started.download_id),
        timeout=10,
    )
    assert list((await verify(here, node)).corrupt_files) == []


async def test_it_stops_when_the_caller_goes_away(here: Lab) -> None:
    node = await here.worker()
    await here.fetch(node, MODEL)
    endless(here, node, SECOND)
    request = pb.VerifyModelRequest(node_id=node, model_id=SECOND)
    stream = here.remote.stream(here.stub.VerifyModel, request)
    async with aclosing(stream):
        async for message in stream:
            if message.verification.verified_bytes:
                break
        assert await refusal(here, node, SECOND) is Reason.MODEL_IN_USE
        # Another model waits its turn.
        waiting = asyncio.create_task(verify(here, node))
    assert (await waiting).done

    async def begins_anew() -> bool:
        return await refusal_of(here, request) is not Reason.MODEL_IN_USE

    await eventually(begins_anew)


async def test_a_worker_that_goes_away_is_an_error(here: Lab) -> None:
    node = await here.worker()
    endless(here, node, SECOND)
    request = pb.VerifyModelRequest(node_id=node, model_id=SECOND)
    async with aclosing(here.remote.stream(here.stub.VerifyModel, request)) as steps:
        await anext(steps)
        # It does not wait for what is being read.
        async with asyncio.timeout(LIMIT_SECONDS):
            await here.stop_worker(node)
            with pytest.raises(ShardringError) as lost:
                async for _ in steps:
                    pass
    assert lost.value.reason is Reason.WORKER_NOT_ATTACHED


async def test_every_attached_node_s_disk_is_listed(here: Lab) -> None:
    nodes = [await here.worker() for _ in range(2)]
    listed = await here.remote.unary(here.stub.ListModels, pb.ListModelsRequest(), timeout=5)
    room = {disk.node_id: disk.available_bytes for disk in listed.disks}
    assert list(room) == sorted(room)
    assert all(room[node] > 0 for node in nodes)
    await here.stop_worker(nodes[0])

    async def gone() -> bool:
        answer = await here.remote.unary(here.stub.ListModels, pb.ListModelsRequest(), timeout=5)
        return nodes[0] not in {disk.node_id for disk in answer.disks}

    await eventually(gone)
