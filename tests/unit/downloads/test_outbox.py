"""What a worker tells the service, and when."""

import dataclasses
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from services.downloads.domain.records import (
    CachedModel,
    Download,
    DownloadState,
    Verification,
)
from services.downloads.worker.outbox import Outbox
from shardring.downloads.v1.downloads_pb2 import (
    DOWNLOAD_STATE_COMPLETED,
    DOWNLOAD_STATE_ONGOING,
)
from shardring.downloads.v1.downloads_service_pb2 import AttachWorkerRequest, CommandResult


class Disk:
    """A disk whose room a test sets; `models` are what lies on it."""

    def __init__(self, available_bytes: int) -> None:
        self.available_bytes = available_bytes
        self.models: list[CachedModel] = []

    def outbox(self) -> Outbox:
        return Outbox(
            node_id="n",
            downloads={},
            read_model=lambda _: self.models,
            available_bytes=lambda: self.available_bytes,
            hub_port=0,
        )


async def sent(messages: AsyncGenerator[AttachWorkerRequest, None]) -> AttachWorkerRequest:
    return await anext(messages)


@pytest.mark.parametrize(
    ("before", "small", "large"),
    [
        (500_000_000_000, 999_000_000, 1_001_000_000),
        (1_000_000, 9_000, 11_000),
        (0, 0, 1),
    ],
)
async def test_the_room_on_the_disk_is_told_when_it_changed_by_much(
    before: int, small: int, large: int
) -> None:
    disk = Disk(before)
    outbox = disk.outbox()
    async with aclosing(outbox.messages([])) as messages:
        assert (await sent(messages)).hello.disk_available_bytes == before
        disk.available_bytes = before + small
        outbox.models_seen([])
        outbox.answer(CommandResult(command_id="c-1"))
        assert (await sent(messages)).result.command_id == "c-1"
        # Many small changes add up.
        disk.available_bytes = before + large
        outbox.models_seen([])
        outbox.answer(CommandResult(command_id="c-2"))
        assert (await sent(messages)).result.command_id == "c-2"
        assert (await sent(messages)).disk.available_bytes == before + large
        # A model that changed has it looked at as well.
        disk.available_bytes = before - before // 2
        outbox.model_changed("org/name")
        outbox.answer(CommandResult(command_id="c-3"))
        assert (await sent(messages)).result.command_id == "c-3"
        assert (await sent(messages)).disk.available_bytes == before - before // 2


async def test_only_the_newest_of_a_verification_is_sent_and_nothing_after_its_answer() -> None:
    outbox = Disk(5).outbox()
    async with aclosing(outbox.messages([])) as messages:
        await sent(messages)
        for done in range(3):
            outbox.verify_progress("c-1", Verification(done, 9))
        progress = (await sent(messages)).verify_progress
        assert (progress.command_id, progress.verification.verified_bytes) == ("c-1", 2)
        outbox.verify_progress("c-1", Verification(8, 9))
        outbox.answer(CommandResult(command_id="c-1"))
        outbox.verify_progress("c-2", Verification(1, 9))
        assert (await sent(messages)).result.command_id == "c-1"
        assert (await sent(messages)).verify_progress.command_id == "c-2"


async def test_a_download_is_never_told_ahead_of_what_is_on_disk() -> None:
    going = Download("d", "n", "o/m", "main", None, DownloadState.ONGOING, 1.0, 1.0)
    downloads = {"d": going}
    reads: list[list[CachedModel]] = []

    def read_model(_: str) -> list[CachedModel]:
        # The last file comes just after the disk was looked at.
        found = [CachedModel("o/m", "c" * 40, ("main",), len(reads) + 1, 2)]
        reads.append(found)
        if len(reads) == 1:
            downloads["d"] = dataclasses.replace(going, state=DownloadState.COMPLETED)
        return found

    outbox = Outbox(
        node_id="n",
        downloads=downloads,
        read_model=read_model,
        available_bytes=lambda: 1,
        hub_port=0,
    )
    async with aclosing(outbox.messages([])) as messages:
        await sent(messages)
        outbox.download_changed(going)
        assert (await sent(messages)).cached_model.downloaded_bytes == 1
        assert (await sent(messages)).download.state == DOWNLOAD_STATE_ONGOING
        outbox.download_changed(downloads["d"])
        assert (await sent(messages)).cached_model.downloaded_bytes == 2
        assert (await sent(messages)).download.state == DOWNLOAD_STATE_COMPLETED
