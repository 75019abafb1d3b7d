"""What the service makes of workers that come, report, refuse and go."""

import asyncio
import dataclasses
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from services.common.errors import Reason, ShardringError
from services.downloads.app import Downloads
from services.downloads.domain.fractions import node_fraction
from services.downloads.domain.records import (
    CachedModel,
    Download,
    DownloadState,
    Layers,
    ModelFacts,
    NodeDisk,
    Verification,
)
from services.downloads.fleet import Fleet
from services.downloads.watchers import Watchers

COMMIT = "c" * 40
FACTS = ModelFacts("o/n", COMMIT, "llama", True, (1, 1), 0, 0, 2, 0, 0, 0, 0, False, "", "", 2, ())
WHOLE = CachedModel("o/n", COMMIT, ("main",), 10, 10, FACTS)


class FakeWorker:
    """Answers as told; counts what it was asked to read."""

    def __init__(self, answer: ModelFacts | ShardringError = FACTS) -> None:
        self.answer = answer
        self.reads = 0
        self.paces: list[float] = []
        self.verifying = 0

    def pace(self, report_seconds: float) -> None:
        self.paces.append(report_seconds)

    async def start_download(
        self,
        download_id: str,
        model_id: str,
        revision: str,
        layers: Layers | None,
        instance_id: str,
    ) -> Download:
        return download(download_id)

    async def cancel_download(self, download_id: str, instance_id: str) -> Download:
        return download(download_id, DownloadState.CANCELLED)

    async def delete_model(self, model_id: str) -> int:
        return 7

    async def read_model(self, model_id: str, revision: str) -> ModelFacts:
        self.reads += 1
        if isinstance(self.answer, ShardringError):
            raise self.answer
        return self.answer

    async def verify_model(self, model_id: str) -> AsyncGenerator[Verification, None]:
        self.verifying += 1
        try:
            yield Verification(1, 2)
            yield Verification(2, 2, done=True)
        finally:
            self.verifying -= 1


def download(
    download_id: str, state: DownloadState = DownloadState.ONGOING, created: float = 1.0
) -> Download:
    return Download(download_id, "n1", "o/n", "main", None, state, created, created, COMMIT)


def service(away_seconds: float = 60) -> tuple[Downloads, Fleet]:
    watchers = Watchers()
    fleet = Fleet(watchers, away_seconds=away_seconds)
    return Downloads(fleet, watchers), fleet


async def test_a_verification_ends_with_whoever_asked_for_it() -> None:
    downloads, fleet = service()
    worker = FakeWorker()
    fleet.attach("n1", worker, [], [])
    async with aclosing(downloads.verify_model("n1", "o/n")) as steps:
        assert await anext(steps) == Verification(1, 2)
        assert worker.verifying == 1
    assert worker.verifying == 0
    assert [step.done async for step in downloads.verify_model("n1", "o/n")] == [False, True]
    for node_id, model_id, reason in (
        ("n2", "o/n", Reason.WORKER_NOT_ATTACHED),
        ("n1", "../x", Reason.INVALID_FIELD),
    ):
        with pytest.raises(ShardringError) as refused:
            await anext(downloads.verify_model(node_id, model_id))
        assert refused.value.reason is reason


async def test_the_room_on_each_attached_node_s_disk_is_known() -> None:
    downloads, fleet = service()
    worker = FakeWorker()
    fleet.attach("n2", worker, [], [])
    fleet.attach("n1", FakeWorker(), [], [])
    fleet.put_disk("n2", 9)
    fleet.put_disk("absent", 9)
    assert downloads.disks() == [NodeDisk("n1", 0), NodeDisk("n2", 9)]
    fleet.detach("n2", worker)
    assert downloads.disks() == [NodeDisk("n1", 0)]
    fleet.close()


async def test_a_node_that_stays_away_gives_up_what_it_was_doing() -> None:
    downloads, fleet = service(away_seconds=0.01)
    worker = FakeWorker()
    going, done = download("d-1"), download("d-2", DownloadState.COMPLETED)
    fleet.attach("n1", worker, [WHOLE], [going, done])
    fleet.detach("n1", worker)
    assert downloads.get("d-1").state is DownloadState.ONGOING
    async for found, _ in downloads.watch(["d-1"]):
        if found[0].state is DownloadState.FAILED:
            break
    error = downloads.get("d-1").error
    assert error is not None
    assert (error.reason, error.metadata["node_id"]) == (Reason.DOWNLOAD_FAILED, "n1")
    assert downloads.get("d-2").state is DownloadState.COMPLETED
    # It was alive all the time: its own word counts.
    fleet.attach("n1", worker, [], [going])
    assert downloads.get("d-1").state is DownloadState.ONGOING


async def test_a_node_that_comes_back_in_time_goes_on() -> None:
    downloads, fleet = service()
    worker, again = FakeWorker(), FakeWorker()
    going = dataclasses.replace(download("d-1"), bytes_per_second=5)
    fleet.attach("n1", worker, [], [going])
    fleet.detach("n1", worker)
    assert downloads.get("d-1").bytes_per_second == 0
    assert fleet.attach("n1", again, [], [going]) is None
    assert downloads.get("d-1") == going
    fleet.attach("n1", again, [], [])
    assert downloads.get("d-1").state is DownloadState.FAILED
    fleet.close()


async def test_a_late_goodbye_does_not_send_the_successor_away() -> None:
    _, fleet = service()
    old, new = FakeWorker(), FakeWorker()
    fleet.attach("n1", old, [], [])
    assert fleet.attach("n1", new, [WHOLE], []) is old
    fleet.detach("n1", old)
    assert fleet.worker("n1") is new


async def test_facts_are_read_by_another_worker_when_one_cannot() -> None:
    downloads, fleet = service()
    lost = FakeWorker(ShardringError(Reason.SERVICE_TIMEOUT, "slow"))
    denied = FakeWorker(ShardringError(Reason.MODEL_ACCESS_DENIED, "no token"))
    able = FakeWorker()
    for node_id, worker in (("n1", lost), ("n2", denied), ("n3", able)):
        fleet.attach(node_id, worker, [], [])
    assert await downloads.model("o/n", "") == FACTS
    able.answer = ShardringError(Reason.HUB_UNREACHABLE, "gone")
    with pytest.raises(ShardringError) as refused:
        await downloads.model("o/n", "")
    assert refused.value.reason is Reason.SERVICE_TIMEOUT
    lost.answer = ShardringError(Reason.MODEL_MALFORMED, "bad")
    before = able.reads
    with pytest.raises(ShardringError) as malformed:
        await downloads.model("o/n", "")
    assert (malformed.value.reason, able.reads) == (Reason.MODEL_MALFORMED, before)


async def test_a_worker_with_the_model_on_disk_is_asked_first_and_reports_are_enough() -> None:
    downloads, fleet = service()
    without, having = FakeWorker(), FakeWorker()
    fleet.attach("n1", without, [], [])
    fleet.attach("n2", having, [dataclasses.replace(WHOLE, facts=None)], [])
    assert await downloads.model("o/n", "") == FACTS
    assert (without.reads, having.reads) == (0, 1)
    unable = dataclasses.replace(FACTS, engine_supported=False)
    fleet.put_cached("n2", dataclasses.replace(WHOLE, facts=unable))
    fleet.attach("n3", FakeWorker(), [dataclasses.replace(WHOLE, downloaded_bytes=1)], [])
    assert (await downloads.model("o/n", COMMIT)).engine_supported
    assert having.reads == 1
    # Facts of a commit never change, so later reports leave them out.
    fleet.put_cached("n3", dataclasses.replace(WHOLE, downloaded_bytes=2, facts=None))
    assert (await downloads.model("o/n", "main")).engine_supported


async def test_watchers_get_everything_once_and_the_last_state_always() -> None:
    downloads, fleet = service()
    fleet.attach("n1", FakeWorker(), [], [download("d-1"), download("d-2")])
    messages = []
    async for found, revision in downloads.watch([]):
        messages.append((found, revision))
        if len(messages) == 1:
            for done in range(100):
                fleet.put(dataclasses.replace(download("d-1"), downloaded_bytes=done))
        elif found[0].state is DownloadState.COMPLETED:
            break
        else:
            fleet.put(download("d-1", DownloadState.COMPLETED))
    assert [[d.download_id for d in found] for found, _ in messages] == [
        ["d-1", "d-2"],
        ["d-1"],
        ["d-1"],
    ]
    assert messages[1][0][0].downloaded_bytes == 99
    revisions = [revision for _, revision in messages]
    assert revisions == sorted(set(revisions))


async def test_watches_end_when_the_service_does() -> None:
    watchers = Watchers()
    with watchers.watch() as watch:
        waiting = asyncio.create_task(watch.changed())
        await asyncio.sleep(0)
        watchers.close()
        with pytest.raises(ShardringError) as ended:
            await waiting
    assert ended.value.reason is Reason.SHUTTING_DOWN


async def test_workers_report_more_seldom_when_there_is_more_to_report() -> None:
    _, fleet = service()
    worker = FakeWorker()
    fleet.attach("n1", worker, [], [])
    live = [download(f"d-{number}") for number in range(1024)]
    for entry in live:
        fleet.put(entry)
    assert worker.paces == sorted(worker.paces)
    assert worker.paces[-1] == fleet.report_seconds == 5.0
    late = FakeWorker()
    fleet.attach("n2", late, [], [])
    assert late.paces == []  # a session begins with the pace that the fleet has
    for entry in live:
        fleet.put(dataclasses.replace(entry, state=DownloadState.COMPLETED))
    assert worker.paces[-1] == late.paces[-1] == 0.5
    assert len(worker.paces) < 20


async def test_a_download_is_stock_while_it_lives_and_its_node_is_attached() -> None:
    _, fleet = service()
    worker = FakeWorker()
    planning = dataclasses.replace(download("d-2"), commit="")
    fleet.attach("n1", worker, [WHOLE], [download("d-1"), planning], hub_port=9)
    fleet.attach("n2", FakeWorker(), [], [])
    assert fleet.hub_ports == {"n1": 9, "n2": 0}

    def live() -> list[str]:
        return [d.download_id for d in fleet.stock.live("n1", "o/n", COMMIT)]

    assert fleet.stock.holders("o/n", COMMIT, "any") == {"n1"}
    assert live() == ["d-1", "d-2"]
    fleet.put(download("d-1", DownloadState.COMPLETED))
    fleet.drop_cached("n1", "o/n")
    assert live() == ["d-2"]
    assert fleet.stock.holders("o/n", COMMIT, "any") == frozenset()
    fleet.put_cached("n1", WHOLE)
    fleet.attach("n1", worker, [], [planning])
    assert fleet.stock.holders("o/n", COMMIT, "any") == frozenset()
    fleet.put_cached("n1", WHOLE)
    fleet.detach("n1", worker)
    assert fleet.stock.holders("o/n", COMMIT, "any") == frozenset()
    assert fleet.hub_ports == {"n2": 0}
    fleet.close()


@pytest.mark.parametrize(
    ("cached", "downloads", "fraction", "state"),
    [
        (None, [], 0, None),
        (WHOLE, [], 1, DownloadState.COMPLETED),
        (WHOLE, [download("a", DownloadState.FAILED)], 1, DownloadState.COMPLETED),
        (None, [download("a", DownloadState.FAILED)], 0, DownloadState.FAILED),
        (None, [download("a", DownloadState.COMPLETED)], 0, None),
        (None, [download("a", DownloadState.PENDING)], 0, DownloadState.PENDING),
        ("half", [], 0.5, DownloadState.PENDING),
        ("half", [download("a", DownloadState.COMPLETED)], 0.5, DownloadState.PENDING),
        ("half", [download("a", DownloadState.ONGOING)], 0.5, DownloadState.ONGOING),
        ("unknown", [], 0, DownloadState.PENDING),
        (
            "half",
            [download("new", created=2), download("old", DownloadState.FAILED)],
            0.5,
            DownloadState.ONGOING,
        ),
    ],
)
def test_a_nodes_fraction(
    cached: CachedModel | str | None,
    downloads: list[Download],
    fraction: float,
    state: DownloadState | None,
) -> None:
    if cached == "half":
        cached = dataclasses.replace(WHOLE, downloaded_bytes=5)
    elif cached == "unknown":
        cached = dataclasses.replace(WHOLE, downloaded_bytes=5, total_bytes=0)
    assert not isinstance(cached, str)
    found = node_fraction("n1", cached, downloads)
    assert (found.fraction, found.state) == (fraction, state)
