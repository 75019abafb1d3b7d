"""Who takes which file from where: a real service, asked by scripted workers."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from services.cli.lab import Lab, LabError
from services.common.addresses import HostPort
from services.common.channel import Remote
from services.common.errors import Reason, ShardringError
from services.common.server import start_server
from services.downloads.app import Downloads
from services.downloads.domain import assignment
from services.downloads.domain.pace import MIN_REPORT_SECONDS, REPORTS_PER_SECOND
from services.downloads.fleet import Fleet
from services.downloads.rpc import registration
from services.downloads.rpc.servicer import DownloadsServicer
from services.downloads.watchers import Watchers
from shardring.downloads.v1 import downloads_pb2
from shardring.downloads.v1 import downloads_service_pb2 as pb
from shardring.downloads.v1.downloads_service_pb2_grpc import DownloadsServiceStub
from shardring.topology.v1 import topology_pb2
from tests.contract.downloads_lab import ENDED, downloads_process, eventually
from tests.contract.test_downloads_hub import get
from tests.contract.topology_lab import Client
from tests.fakes.tiny_model import write_model

MODEL, COMMIT, SIZE = "org/model", "c" * 40, 100


class Scripted:
    """A worker that reports what a test wants, and asks."""

    def __init__(self, remote: Remote, node_id: str, hub_port: int) -> None:
        self.node_id = node_id
        self.paces: list[float] = []
        self.remote = remote
        self.stub = DownloadsServiceStub(remote.channel)
        self._hub_port = hub_port
        self._outgoing: asyncio.Queue[pb.AttachWorkerRequest] = asyncio.Queue()
        self._listening: asyncio.Task[None] | None = None

    async def attach(self, *downloads: downloads_pb2.Download) -> None:
        """Attach; return when the service has taken the hello."""
        hello = pb.WorkerHello(node_id=self.node_id, hub_port=self._hub_port, downloads=downloads)
        self._outgoing.put_nowait(pb.AttachWorkerRequest(hello=hello))
        self._listening = asyncio.create_task(self._listen())
        await eventually(self.welcomed)

    async def welcomed(self) -> bool:
        return bool(self.paces)

    async def detach(self) -> None:
        """Hang up; return when the service has noticed."""
        assert self._listening is not None
        self._listening.cancel()
        await asyncio.wait([self._listening])

        async def gone() -> bool:
            try:
                await self.ask()
            except ShardringError as error:
                return error.reason is Reason.WORKER_NOT_ATTACHED
            return False

        await eventually(gone)

    def download(self, state: str = "ONGOING", **done: int) -> downloads_pb2.Download:
        """Return a download of the model, with so many bytes of these files."""
        return downloads_pb2.Download(
            download_id=f"d-{self.node_id}",
            node_id=self.node_id,
            model_id=MODEL,
            commit=COMMIT,
            revision="main",
            state=downloads_pb2.DownloadState.Value(f"DOWNLOAD_STATE_{state}"),
            files=[
                downloads_pb2.FileProgress(name=name, downloaded_bytes=count, total_bytes=SIZE)
                for name, count in done.items()
            ],
        )

    def send(self, download: downloads_pb2.Download) -> None:
        """Report a download."""
        self._outgoing.put_nowait(pb.AttachWorkerRequest(download=download))

    async def report(self, download: downloads_pb2.Download) -> None:
        """Report a download; return when the service has taken it."""
        self.send(download)

        async def taken() -> bool:
            request = pb.GetDownloadRequest(download_id=download.download_id)
            found = (await self.remote.unary(self.stub.GetDownload, request, timeout=5)).download
            return found.state == download.state and found.files == download.files

        await eventually(taken)

    async def report_disk(self, *names: str, total: int = 3 * SIZE) -> None:
        """Report that these files are whole on disk, and part of another."""
        model = pb.CachedModel(
            model_id=MODEL,
            commit=COMMIT,
            downloaded_bytes=len(names) * SIZE + 1 if len(names) * SIZE < total else total,
            total_bytes=total,
            whole_files=names if len(names) * SIZE < total else (),
        )
        self._outgoing.put_nowait(pb.AttachWorkerRequest(cached_model=model))

        async def taken() -> bool:
            request = pb.GetFractionsRequest(
                model_id=MODEL, node_ids=[self.node_id], revision=COMMIT
            )
            found = await self.remote.unary(self.stub.GetFractions, request, timeout=5)
            return found.fractions[0].downloaded_bytes == model.downloaded_bytes

        await eventually(taken)

    async def ask(
        self,
        *names: str,
        count: int = 8,
        excluded: Iterable[str] = (),
        released: Iterable[str] = (),
    ) -> pb.AssignSourcesResponse:
        request = pb.AssignSourcesRequest(
            node_id=self.node_id,
            model_id=MODEL,
            commit=COMMIT,
            file_names=names,
            max_count=count,
            excluded_node_ids=excluded,
            released_file_names=released,
        )
        return await self.remote.unary(self.stub.AssignSources, request, timeout=5)

    async def told(
        self, *names: str, excluded: Iterable[str] = (), released: Iterable[str] = ()
    ) -> dict[str, list[tuple[str, int]]]:
        """Return where to take each file from, nowhere for the hub."""
        answer = await self.ask(*names, excluded=excluded, released=released)
        assert answer.HasField("retry_delay") == (len(answer.sources) < len(names))
        return {s.file_name: [(n.node_id, n.port) for n in s.nodes] for s in answer.sources}

    async def _listen(self) -> None:
        async for command in self.stub.AttachWorker(self._reports()):
            assert command.WhichOneof("command") == "welcome"
            self.paces.append(command.welcome.min_report_interval.ToNanoseconds() / 1e9)

    async def _reports(self) -> AsyncIterator[pb.AttachWorkerRequest]:
        while True:
            yield await self._outgoing.get()

    async def close(self) -> None:
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.wait([self._listening])


@asynccontextmanager
async def workers(service: HostPort, count: int = 3) -> AsyncIterator[list[Scripted]]:
    """Give workers n0, n1, ..., each with a live download; they serve at 9000, 9001, ..."""
    remote = Remote("downloads", [service])
    made = [Scripted(remote, f"n{number}", 9000 + number) for number in range(count)]
    try:
        for worker in made:
            await worker.attach(worker.download())
        yield made
    finally:
        for worker in made:
            await worker.close()
        await remote.close()


async def test_files_are_fetched_once_and_passed_on() -> None:
    with downloads_process() as service:
        async with workers(service) as (a, b, c):
            assert await a.told("x") == {"x": []}
            assert await b.told("x", "y") == {"y": []}
            assert await c.told("x", "y") == {}
            # Half of it is not enough.
            await a.report(a.download(x=SIZE // 2))
            assert await c.told("x") == {}
            await a.report(a.download(x=SIZE))
            assert await c.told("x", "y") == {"x": [("n0", 9000)]}
            await c.report_disk("x")
            assert await b.told("x") == {"x": [("n0", 9000), ("n2", 9002)]}
            # Who excludes those has to go to the hub.
            assert await b.told("x", excluded=["n0", "n2"]) == {"x": []}
            await c.report_disk("x", "y", "z")
            assert await a.told("y", "z") == {"y": [("n2", 9002)], "z": [("n2", 9002)]}


async def test_what_nobody_gets_on_with_is_free() -> None:
    with downloads_process() as service:
        async with workers(service) as (a, b, c):
            assert await a.told("x", "y", "z", "u") == {"x": [], "y": [], "z": [], "u": []}
            assert await b.told("x", "y", "z", "u") == {}
            # Given up, found faulty, and gone.
            assert await a.told(released=["x"]) == {}
            assert await b.told("x", "y") == {"x": []}
            assert await c.told("x", "y", excluded=["n0"]) == {"y": []}
            await a.detach()
            assert await b.told("y", "z") == {"z": []}
            assert await c.told("z", "u") == {"u": []}


async def test_a_restarted_service_knows_who_fetches_what() -> None:
    with downloads_process() as service:
        remote = Remote("downloads", [service])
        a, b = Scripted(remote, "a", 1), Scripted(remote, "b", 2)
        going = a.download(x=5, y=5)
        going.files[0].bytes_per_second = 7
        await a.attach(going)
        await b.attach(b.download())
        assert await b.told("x", "y") == {"y": []}
        await a.close()
        await b.close()
        await remote.close()


@asynccontextmanager
async def service_here() -> AsyncIterator[HostPort]:
    """Run the service in this process, where its figures can be changed."""
    watchers = Watchers()
    fleet = Fleet(watchers)
    servicer = DownloadsServicer(Downloads(fleet, watchers), fleet)
    server = await start_server(HostPort("127.0.0.1", 0), [registration(servicer)])
    try:
        yield HostPort("127.0.0.1", server.port)
    finally:
        servicer.end_sessions()
        watchers.close()
        await server.stop()
        fleet.close()


async def test_a_stalled_claimant_is_passed_by(monkeypatch: pytest.MonkeyPatch) -> None:
    async with service_here() as service, workers(service, 2) as (a, b):
        assert await a.told("x") == {"x": []}
        assert await b.told("x") == {}
        await a.report(a.download(x=SIZE // 2))
        monkeypatch.setattr(assignment, "STALLED_SECONDS", 0.0)
        assert await b.told("x") == {"x": []}


async def test_a_claim_ends_with_its_download(monkeypatch: pytest.MonkeyPatch) -> None:
    async with service_here() as service, workers(service, 2) as (a, b):
        assert await a.told("x") == {"x": []}
        monkeypatch.setattr(assignment, "SETTLE_SECONDS", 0.0)
        assert await b.told("x") == {}
        await a.report(a.download("CANCELLED"))
        assert await b.told("x") == {"x": []}


async def test_who_is_not_attached_is_told_nothing() -> None:
    with downloads_process() as service:
        remote = Remote("downloads", [service])
        with pytest.raises(ShardringError) as refusal:
            await Scripted(remote, "n9", 1).ask("x")
        assert refusal.value.reason is Reason.WORKER_NOT_ATTACHED
        async with workers(service, 1) as (a,):
            for bad in ("../x", "/x", ""):
                with pytest.raises(ShardringError) as refusal:
                    await a.ask(bad)
                assert refusal.value.reason is Reason.INVALID_FIELD
            with pytest.raises(ShardringError, match="max_count"):
                await a.ask("x", count=65)
        await remote.close()


async def test_node_processes_serve_their_disks_to_each_other(tmp_path: Path) -> None:
    write_model(tmp_path / "models" / MODEL)
    lab = Lab(tmp_path / "lab")
    try:
        await lab.start_control(tmp_path / "models", heartbeat_seconds=0.2)
        await lab.start_node("ada")
        remote = Remote("downloads", [lab.address("downloads")])
        first = await _fetched(remote, await _node_id(lab, "ada"))
        assert first.received_from_hub_bytes == first.total_bytes
        # Where it says it serves, all of it can be had, and by commit nothing else.
        asking = Scripted(remote, "n0", 9000)
        await asking.attach(asking.download())
        request = pb.AssignSourcesRequest(
            node_id="n0",
            model_id=MODEL,
            commit=first.commit,
            file_names=["config.json"],
            max_count=1,
        )
        answer = await remote.unary(asking.stub.AssignSources, request, timeout=5)
        (source,) = answer.sources[0].nodes
        assert source.node_id == first.node_id
        there = HostPort("127.0.0.1", source.port)
        path = f"/{MODEL}/resolve/{first.commit}/config.json"
        config = (tmp_path / "models" / MODEL / "config.json").read_bytes()
        assert (await get(there, path))[:2] == (200, config)
        # Another node takes the model from there, by the link that it found.
        await lab.start_node("bob")
        bob = await _node_id(lab, "bob")
        await _linked(lab)
        second = await _fetched(remote, bob)
        assert second.received_from_nodes_bytes == second.total_bytes == first.total_bytes
        # A port that is taken is told, and the node does not start.
        with pytest.raises(LabError, match=f"Cannot listen on 127.0.0.1:{source.port}"):
            home = ("--data-dir", str(tmp_path / "eve"), "--topology", "127.0.0.1:1")
            await lab.start("eve", "node", "--lab", *home, "--hub-port", str(source.port))
        await asking.close()
        await remote.close()
    finally:
        await lab.stop()


async def _topology(lab: Lab) -> topology_pb2.Topology:
    client = Client(lab.address("topology"))
    try:
        return (await client.get()).topology
    finally:
        await client.remote.close()


async def _node_id(lab: Lab, name: str) -> str:
    """Return a node's id once it is in the topology."""
    found: list[str] = []

    async def there() -> bool:
        found[:] = [n.node_id for n in (await _topology(lab)).nodes if n.name == name]
        return bool(found)

    await eventually(there)
    return found[0]


async def _linked(lab: Lab) -> None:
    """Wait until two nodes have verified links both ways."""

    async def both() -> bool:
        return len((await _topology(lab)).links) == 2

    await eventually(both)


async def _fetched(remote: Remote, node_id: str) -> downloads_pb2.Download:
    """Have a node fetch the model, and return the download as it ended."""
    stub = DownloadsServiceStub(remote.channel)
    start = pb.StartDownloadRequest(node_id=node_id, model_id=MODEL)
    latest: list[downloads_pb2.Download] = []

    async def ended() -> bool:
        if not latest:
            try:
                answer = await remote.unary(stub.StartDownload, start, timeout=5)
            except ShardringError as error:
                if error.reason is Reason.WORKER_NOT_ATTACHED:
                    return False
                raise
            latest.append(answer.download)
        request = pb.GetDownloadRequest(download_id=latest[0].download_id)
        latest[0] = (await remote.unary(stub.GetDownload, request, timeout=5)).download
        return latest[0].state in ENDED

    await eventually(ended)
    assert latest[0].state == downloads_pb2.DOWNLOAD_STATE_COMPLETED, latest[0].error
    return latest[0]


async def test_workers_are_told_when_to_report_more_seldom_and_more_often_again() -> None:
    with downloads_process() as service:
        async with workers(service, 2) as (a, b):
            assert a.paces[0] == b.paces[0] == MIN_REPORT_SECONDS
            many = round(REPORTS_PER_SECOND)
            for number in range(many):
                download = a.download()
                download.download_id = f"d-{number}"
                a.send(download)

            async def slow() -> bool:
                # The last step: with what each has besides, all of them are just above a second's.
                return a.paces[-1] == b.paces[-1] == 1.5

            await eventually(slow)
            # Who comes later is told at once.
            late = Scripted(b.remote, "late", 1)
            await late.attach()
            assert late.paces == [b.paces[-1]]
            for number in range(many):
                download = a.download("COMPLETED")
                download.download_id = f"d-{number}"
                a.send(download)

            async def quick() -> bool:
                return b.paces[-1] == late.paces[-1] == MIN_REPORT_SECONDS

            await eventually(quick)
            await late.close()
