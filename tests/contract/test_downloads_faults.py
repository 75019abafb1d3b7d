"""Each way in which a hub can be at fault: what a download makes of it, and what people see."""

import asyncio
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from types import FrameType

import pytest
from huggingface_hub.errors import HfHubHTTPError

from services.common.errors import Reason, ShardringError
from services.downloads.worker.asking import ask
from services.downloads.worker.patience import Patience, with_patience
from shardring.downloads.v1 import downloads_pb2
from shardring.downloads.v1 import downloads_service_pb2 as pb
from tests.contract.downloads_lab import Lab, eventually
from tests.fakes.faulty_hub import FaultyHub, Kind
from tests.fakes.tiny_model import write_model

MODEL = "org/model"
LAYER_BYTES = 2 * 2**20
MIDDLE = "model-00002-of-00003.safetensors"
WAIT_SECONDS = 1
KINDS: tuple[Kind, ...] = ("listing", "facts", "head", "body")

ONGOING = downloads_pb2.DOWNLOAD_STATE_ONGOING
COMPLETED = downloads_pb2.DOWNLOAD_STATE_COMPLETED
FAILED = downloads_pb2.DOWNLOAD_STATE_FAILED


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder / MODEL, layer_bytes=LAYER_BYTES)
    return folder


def assert_exact(done: downloads_pb2.Download, models: Path) -> None:
    """The download is whole, and so is every byte of it."""
    assert done.state == COMPLETED, done.error
    assert done.downloaded_bytes == done.total_bytes > 0
    assert len(done.files) >= 5
    for file in done.files:
        found = (Path(done.snapshot_path) / file.name).read_bytes()
        assert found == (models / MODEL / file.name).read_bytes(), file.name


def in_seconds(seconds: int) -> str:
    """Return a moment from now as HTTP writes it, which leaves the fraction of a second out."""
    return format_datetime(datetime.now(UTC) + timedelta(seconds=seconds + 1), usegmt=True)


async def half_fetched(here: Lab, hub: FaultyHub, node: str) -> None:
    """Leave a part of the middle file on a node's disk."""
    hub.faults.stall_after = LAYER_BYTES
    download = await here.start(node, MODEL, layers=(1, 3))
    await asyncio.wait_for(hub.stalled.wait(), 20)

    async def some_on_disk() -> bool:
        return (await here.get(download.download_id)).downloaded_bytes > LAYER_BYTES // 2

    await eventually(some_on_disk)
    request = pb.CancelDownloadRequest(download_id=download.download_id)
    await here.remote.unary(here.stub.CancelDownload, request, timeout=5)
    hub.faults.stall_after = None
    hub.seen.clear()


async def test_a_slow_hub_is_watched(here: Lab, hub: FaultyHub, models: Path) -> None:
    node = await here.worker()
    hub.faults.request_bytes_per_second = LAYER_BYTES / 2
    started = await here.start(node, MODEL)
    history = await here.watch(started.download_id)
    assert_exact(history[-1], models)
    under_way = [entry for entry in history if entry.state == ONGOING]
    timed = [entry for entry in under_way if entry.bytes_per_second and entry.time_left.seconds]
    assert timed, under_way
    for entry in timed:
        assert 0 < entry.downloaded_bytes <= entry.total_bytes
        assert sum(file.downloaded_bytes for file in entry.files) == entry.downloaded_bytes
        assert sum(file.total_bytes for file in entry.files) == entry.total_bytes


async def test_a_hub_that_cuts_is_gone_on_with(here: Lab, hub: FaultyHub, models: Path) -> None:
    node = await here.worker()
    hub.faults.cut_after, hub.faults.cuts = LAYER_BYTES // 2, 5
    done = await here.fetch(node, MODEL)
    assert_exact(done, models)
    assert hub.faults.cuts == 0
    ranges = [request.range for request in hub.asked("body")]
    assert len([wanted for wanted in ranges if wanted]) >= 5, ranges
    # What came before a cut is kept: all but what stood in buffers.
    weights = sum(request.sent_bytes for request in hub.asked("body"))
    assert weights < done.total_bytes + 5 * LAYER_BYTES // 2


@pytest.mark.parametrize("unannounced", [True, False])
@pytest.mark.parametrize("added", [1000, -1000])
async def test_a_body_of_another_length_is_thrown_away(
    here: Lab, hub: FaultyHub, models: Path, added: int, unannounced: bool
) -> None:
    node = await here.worker()
    hub.faults.lengthen, hub.faults.lengths, hub.faults.unannounced = added, 1, unannounced
    assert_exact(await here.fetch(node, MODEL), models)
    assert hub.faults.lengths == 0


@pytest.mark.parametrize("added", [1000, -1000])
async def test_a_hub_that_never_sends_what_it_listed_is_said_to(
    here: Lab, hub: FaultyHub, added: int
) -> None:
    node = await here.worker()
    hub.faults.lengthen, hub.faults.lengths = added, 1000
    failed = await here.fetch(node, MODEL, layers=(1, 3))
    assert (failed.state, failed.error.reason) == (FAILED, "DOWNLOAD_FAILED")
    assert "another size than it announced" in failed.error.message
    assert hub.endpoint in failed.error.message
    assert hub.faults.lengths > 900, "it must not be asked for ever"


async def test_a_body_with_another_hash_is_thrown_away(
    here: Lab, hub: FaultyHub, models: Path
) -> None:
    node = await here.worker()
    hub.faults.spoil_byte = 1
    assert_exact(await here.fetch(node, MODEL), models)


async def test_a_hub_that_never_sends_the_content_it_listed_is_said_to(
    here: Lab, hub: FaultyHub
) -> None:
    node = await here.worker()
    hub.faults.spoil_byte = 1000
    failed = await here.fetch(node, MODEL, layers=(1, 3))
    assert (failed.state, failed.error.reason) == (FAILED, "DOWNLOAD_FAILED")
    assert hub.endpoint in failed.error.message
    assert MIDDLE in failed.error.message
    assert hub.faults.spoil_byte > 900, "it must not be asked for ever"
    assert not list(here.cache(node).rglob(MIDDLE))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "told",
    [
        lambda: {"Retry-After": str(WAIT_SECONDS)},
        lambda: {"Retry-After": in_seconds(WAIT_SECONDS)},
        lambda: {"RateLimit": f'"api";r=0;t={WAIT_SECONDS}'},
    ],
    ids=["seconds", "date", "window"],
)
async def test_a_stated_wait_is_kept(
    here: Lab, hub: FaultyHub, models: Path, kind: Kind, told: Callable[[], dict[str, str]]
) -> None:
    node = await here.worker()
    hub.refuse(kind, 429, headers=told)
    assert_exact(await here.fetch(node, MODEL), models)
    asked = hub.asked(kind)
    (refused,) = [request for request in asked if request.status == 429]
    again = [r for r in asked if r.name == refused.name and r.time > refused.time]
    assert again[0].time - refused.time >= WAIT_SECONDS


@pytest.mark.parametrize("kind", KINDS)
async def test_a_hub_with_a_fault_is_asked_again(
    here: Lab, hub: FaultyHub, models: Path, kind: Kind
) -> None:
    node = await here.worker()
    for status in (500, 502, 503):
        hub.refuse(kind, status)
    assert_exact(await here.fetch(node, MODEL), models)
    assert {500, 502, 503} <= {request.status for request in hub.asked(kind)}


async def test_a_hub_that_comes_back_is_waited_for(here: Lab, hub: FaultyHub, models: Path) -> None:
    node = await here.worker()
    await hub.stop()
    started = await here.start(node, MODEL)
    await asyncio.sleep(0.5)
    await hub.start()
    assert_exact((await here.watch(started.download_id))[-1], models)


async def test_a_hub_that_stays_away_is_named(here: Lab, hub: FaultyHub) -> None:
    node = await here.worker()
    await hub.stop()
    failed = await here.fetch(node, MODEL)
    assert (failed.state, failed.error.reason) == (FAILED, "HUB_UNREACHABLE")
    assert failed.error.metadata["hub"] == hub.endpoint
    assert "HF_ENDPOINT" in failed.error.message


async def test_bodies_on_another_host_are_fetched_without_the_token(
    here: Lab, hub: FaultyHub, models: Path
) -> None:
    node = await here.worker(token="secret")
    hub.faults.redirect = True
    assert_exact(await here.fetch(node, MODEL), models)
    assert {request.host for request in hub.asked("body") if request.sent_bytes} == {"storage"}
    tokens = {(request.host, request.authorization) for request in hub.seen}
    assert tokens == {("storage", ""), ("hub", "Bearer secret")}
    assert {request.authorization for request in hub.listings} == {"Bearer secret"}


@pytest.mark.parametrize("refused", [True, False])
async def test_without_ranges_a_part_is_never_appended_to(
    here: Lab, hub: FaultyHub, models: Path, refused: bool
) -> None:
    node = await here.worker()
    await half_fetched(here, hub, node)
    hub.faults.refuse_range, hub.faults.ignore_range = refused, not refused
    assert_exact(await here.fetch(node, MODEL), models)
    # The part was tried to go on from, first.
    assert next(r.range for r in hub.asked("body") if r.name == MIDDLE)


async def test_a_gated_model_says_where_to_ask(here: Lab, hub: FaultyHub, models: Path) -> None:
    hub.faults.gated_to = "granted"
    for token in ("", "other"):
        node = await here.worker(token=token or None)
        failed = await here.fetch(node, MODEL)
        assert (failed.state, failed.error.reason) == (FAILED, "MODEL_ACCESS_DENIED")
        assert f"{hub.endpoint}/{MODEL}" in failed.error.message
        assert "HF_TOKEN" in failed.error.message
        refused = [request for request in hub.seen if request.status in (401, 403)]
        assert 0 < len(refused) <= 10, "a refusal is final"
        hub.seen.clear()
        await here.stop_worker(node)
    node = await here.worker(token="granted")
    assert_exact(await here.fetch(node, MODEL), models)
    assert (await here.model(MODEL)).gated


async def test_a_model_for_others_is_as_if_not_there(here: Lab, hub: FaultyHub) -> None:
    node = await here.worker()
    hub.faults.private_to = "others"
    failed = await here.fetch(node, MODEL)
    assert (failed.state, failed.error.reason) == (FAILED, "MODEL_NOT_FOUND")
    assert "spelling" in failed.error.message
    assert "HF_TOKEN" in failed.error.message
    assert len(hub.listings) == 1, "a refusal is final"


async def test_a_listing_of_thousands_comes_in_pages(
    here: Lab, hub: FaultyHub, tmp_path: Path
) -> None:
    models = tmp_path / "many"
    write_model(models / MODEL)
    (models / MODEL / "a").mkdir()
    for number in range(2500):
        (models / MODEL / "a" / f"{number}.txt").write_text("")
    hub.push(models, MODEL)
    # What the model needs comes after what the first answer lists.
    hub.faults.listed_files, hub.faults.page_size = 1000, 700
    node = await here.worker()
    done = await here.fetch(node, MODEL)
    assert_exact(done, models)
    assert not [file.name for file in done.files if file.name.startswith("a/")]
    pages = [request for request in hub.listings if "/tree/" in request.name]
    assert len(pages) >= 4
    assert (await here.model(MODEL)).layer_count == 4


async def test_pages_that_lead_elsewhere_are_not_followed(
    here: Lab, hub: FaultyHub, tmp_path: Path
) -> None:
    models = tmp_path / "many"
    write_model(models / MODEL)
    for number in range(1001):
        (models / MODEL / f"{number}.txt").write_text("")
    other = FaultyHub(models)
    await other.start()
    try:
        hub.push(models, MODEL)
        hub.faults.page_size, hub.next_page_host = 700, other.address
        node = await here.worker(token="secret")
        failed = await here.fetch(node, MODEL)
        assert (failed.state, failed.error.reason) == (FAILED, "MODEL_MALFORMED")
        assert "another host" in failed.error.message
        assert not other.listings
    finally:
        await other.stop()


async def test_a_commit_that_moves_half_way_changes_nothing(
    here: Lab, hub: FaultyHub, models: Path, tmp_path: Path
) -> None:
    moved = tmp_path / "moved"
    write_model(moved / MODEL, layer_bytes=LAYER_BYTES + 1000)
    (moved / MODEL / "tokenizer.json").write_text('{"new": 1}')
    node = await here.worker()
    hub.faults.stall_after = LAYER_BYTES
    started = await here.start(node, MODEL)
    await asyncio.wait_for(hub.stalled.wait(), 20)
    hub.push(moved, MODEL)
    hub.faults.stall_after = None
    first = (await here.watch(started.download_id))[-1]
    assert_exact(first, models)
    asked = {request.commit for request in hub.seen}
    assert asked == {first.commit}, "files are asked for by their commit only"

    second = await here.fetch(node, MODEL)
    assert second.commit != first.commit
    assert_exact(second, moved)


async def test_patience_has_an_end(hub: FaultyHub) -> None:
    hub.refuse("listing", 503, times=1000)
    url = f"{hub.endpoint}/api/models/{MODEL}"

    def impatient(seconds: float) -> None:
        with with_patience(Patience(seconds)), pytest.raises(HfHubHTTPError):
            ask(url, {}, 1000)

    await asyncio.to_thread(impatient, 0)
    assert len(hub.listings) == 1
    await asyncio.to_thread(impatient, 10)
    assert 2 < len(hub.listings) < 20
    # Longer than anybody would wait: so that it is said at once.
    hub.listings.clear()
    hub.relent()
    hub.refuse("listing", 429, headers=lambda: {"Retry-After": "3600"})
    await asyncio.to_thread(impatient, 900)
    assert len(hub.listings) == 1


async def test_a_long_stated_wait_is_passed_on(here: Lab, hub: FaultyHub) -> None:
    await here.worker()
    hub.refuse("listing", 429, headers=lambda: {"Retry-After": "3600"})
    request = pb.GetModelRequest(model_id=MODEL)
    with pytest.raises(ShardringError) as refused:
        await here.remote.unary(here.stub.GetModel, request, timeout=15)
    assert refused.value.reason is Reason.HUB_UNREACHABLE
    assert "3600 s" in refused.value.message


@pytest.mark.parametrize("stopped", ["download", "worker"])
async def test_nothing_waits_for_a_hub_in_vain(here: Lab, hub: FaultyHub, stopped: str) -> None:
    node = await here.worker()
    hub.refuse("listing", 429, headers=lambda: {"Retry-After": "600"})
    download = await here.start(node, MODEL)

    async def refused() -> bool:
        return bool(hub.listings)

    await eventually(refused)
    async with asyncio.timeout(10):
        if stopped == "worker":
            await here.stop_worker(node)
        else:
            request = pb.CancelDownloadRequest(download_id=download.download_id)
            await here.remote.unary(here.stub.CancelDownload, request, timeout=5)
            ended = (await here.watch(download.download_id))[-1]
            assert ended.state == downloads_pb2.DOWNLOAD_STATE_CANCELLED

    async def over() -> bool:
        # Threads are kept for what comes; none may still be in the middle of asking.
        return not [frame for frame in sys._current_frames().values() if _waits(frame)]

    await eventually(over)


def _waits(frame: FrameType | None) -> bool:
    """True for a thread in the middle of asking the hub."""
    while frame is not None:
        if frame.f_code.co_name == "ask" and frame.f_code.co_filename.endswith("asking.py"):
            return True
        frame = frame.f_back
    return False
