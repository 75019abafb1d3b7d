"""What a gateway's follower does with what the cluster says, and does not say."""

import asyncio
import contextlib
import dataclasses
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from services.cli.census import Census
from services.cli.client import Cluster
from services.cli.gateway import following
from services.cli.gateway.following import Follower
from services.cli.gateway.smg import Served, Smg, SmgError
from services.cli.gateway.workers import Worker
from services.common.addresses import HostPort
from services.common.errors import Reason, ShardringError
from tests.unit.cli.test_gateway_workers import instance

LOST = ShardringError(Reason.SERVICE_UNAVAILABLE, "Cannot reach topology.")


class FakeSmg:
    """Takes every worker at once, unless told to be silent."""

    def __init__(self) -> None:
        self.workers: dict[str, HostPort] = {}
        self.is_silent = False

    def set_workers(self, workers: Mapping[str, HostPort]) -> None:
        self.workers = dict(workers)

    async def served(self) -> Served:
        if self.is_silent:
            raise SmgError("smg does not tell its workers: timed out.")
        return Served(frozenset(self.workers), frozenset({"org/model"}))


class Ear:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.heard: asyncio.Queue[str] = asyncio.Queue()

    def waiting(self) -> None:
        self.heard.put_nowait("waiting")

    def cluster_lost(self, why: str) -> None:
        self.heard.put_nowait(f"lost: {why}")

    def added(self, worker: Worker, address: HostPort) -> None:
        self.heard.put_nowait(f"added {worker.instance_id} at {address.host}")

    def removed(self, worker: Worker) -> None:
        self.heard.put_nowait(f"removed {worker.instance_id}")

    def late(self, worker: Worker, why: str) -> None:
        self.heard.put_nowait(f"late {worker.instance_id}: {why}")

    async def next(self) -> str:
        async with asyncio.timeout(20):
            return await self.heard.get()


class World:
    """A cluster that says what it is set to; `looks` counts how often it was asked."""

    def __init__(self) -> None:
        self.census: Census | ShardringError = LOST
        self.smg = FakeSmg()
        self.ear = Ear()
        self.looks = 0

    async def take_census(self, _: Any) -> Census:
        self.looks += 1
        if isinstance(self.census, ShardringError):
            raise self.census
        return self.census

    async def looked_twice(self) -> None:
        """Return once a look that began after now is over."""
        until = self.looks + 2
        async with asyncio.timeout(20):
            while self.looks < until:
                await asyncio.sleep(0.01)


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    world = World()
    monkeypatch.setattr(following, "take_census", world.take_census)
    monkeypatch.setattr(following, "_LOOK_SECONDS", 0.02)
    monkeypatch.setattr(following, "_EAGER_SECONDS", 0.02)
    follower = Follower(cast(Cluster, None), cast(Smg, world.smg), (), world.ear)
    task = asyncio.create_task(follower.run())
    yield world
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert world.ear.heard.empty()


@asynccontextmanager
async def listening() -> AsyncIterator[int]:
    """A port of loopback that takes connections."""
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


def census(*instances: Any, silent: tuple[str, ...] = ()) -> Census:
    return Census(list(instances), {}, {}, frozenset(silent))


async def test_it_follows_what_comes_and_goes(world: World) -> None:
    assert await world.ear.next() == "lost: Cannot reach topology."
    await world.looked_twice()
    world.census = census()
    assert await world.ear.next() == "waiting"
    async with listening() as port:
        here = instance("a", "127.0.0.1", port=port)
        world.census = census(here)
        assert await world.ear.next() == "added a at 127.0.0.1"
        assert list(world.smg.workers.values()) == [HostPort("127.0.0.1", port)]
        # Neither a cluster nor a head that does not answer takes a worker away.
        world.census = LOST
        assert await world.ear.next() == "lost: Cannot reach topology."
        world.census = census(silent=("head",))
        await world.looked_twice()
        assert world.smg.workers
        # Nor does a topology that has just started and not heard of the head yet.
        world.census = dataclasses.replace(census(), gathering=True)
        await world.looked_twice()
        assert world.smg.workers
        world.census = census()
        assert await world.ear.next() == "removed a"
        assert await world.ear.next() == "waiting"
        assert world.smg.workers == {}


async def test_of_several_addresses_the_first_that_answers(world: World) -> None:
    await world.ear.next()
    async with listening() as port:
        world.census = census(instance("a", "127.0.0.9", "127.0.0.1", port=port))
        assert await world.ear.next() == "added a at 127.0.0.1"


async def test_what_does_not_come_is_told_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.ear.next()
    monkeypatch.setattr(following, "_TAKING_SECONDS", 0.0)
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        port = deaf.getsockname()[1]
        world.census = census(instance("a", "127.0.0.1", port=port))
        assert await world.ear.next() == (
            f"late a: nothing answers at 127.0.0.1:{port}; is the port open to this machine?"
        )
        await world.looked_twice()
    world.smg.is_silent = True
    async with listening() as port:
        world.census = census(instance("b", "127.0.0.1", port=port))
        assert await world.ear.next() == (
            "late b: smg has not taken it yet: smg does not tell its workers: timed out"
        )
        world.smg.is_silent = False
        assert await world.ear.next() == "added b at 127.0.0.1"
