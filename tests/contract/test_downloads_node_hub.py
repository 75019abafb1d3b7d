"""A node's cache folder as other nodes see it: asked by huggingface_hub, and by people who mean
harm."""

import asyncio
import contextlib
import hashlib
import json
import logging
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from huggingface_hub import (
    HfApi,
    get_hf_file_metadata,
    hf_hub_download,
    hf_hub_url,
    snapshot_download,
)
from huggingface_hub.errors import (
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from services.common.addresses import HostPort
from services.common.security import Security
from services.common.server import ListenError
from services.downloads import hub_protocol
from services.downloads.hub import HubServer, hub_app
from services.downloads.hub_protocol import CHUNK_BYTES
from services.downloads.worker import node_hub
from services.downloads.worker.cache import Cache
from services.downloads.worker.node_hub import NodeHub
from services.downloads.worker.options import CacheOptions
from services.downloads.worker.sources import Hub
from tests.contract.downloads_lab import eventually
from tests.contract.test_downloads_hub import get
from tests.fakes.tiny_model import write_model

MODEL = "org/model"
WEIGHTS = "model-00002-of-00003.safetensors"
LARGE = "model-large.safetensors"
LOOPBACK = HostPort("127.0.0.1", 0)


@dataclass
class Served:
    """A cache folder that holds MODEL at a commit, and where it is served."""

    cache: Cache
    commit: str
    address: HostPort

    @property
    def storage(self) -> Path:
        return self.cache.storage(MODEL)

    @property
    def endpoint(self) -> str:
        return f"http://{self.address}"

    def path(self, name: str, revision: str = "") -> str:
        return f"/{MODEL}/resolve/{revision or self.commit}/{name}"

    def snapshot(self, name: str) -> Path:
        return self.cache.snapshot(MODEL, self.commit) / name


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    """Fill a cache as a worker would, then serve it."""
    write_model(tmp_path / "served" / MODEL)
    (tmp_path / "served" / MODEL / LARGE).write_bytes(bytes(range(256)) * (3 * CHUNK_BYTES // 256))
    (tmp_path / "secret.txt").write_text("secret")
    source = HubServer(hub_app(tmp_path / "served"), LOOPBACK)
    endpoint = f"http://{await source.start()}"
    cache = Cache(tmp_path / "cache")

    def fill() -> str:
        snapshot_download(MODEL, endpoint=endpoint, cache_dir=cache.folder)
        options = CacheOptions(cache_dir=cache.folder, endpoint=endpoint, offline=False)
        found = Hub(options).repository(MODEL, "main")
        cache.keep_listing(MODEL, found.commit, found.listing)
        return found.commit

    commit = await asyncio.to_thread(fill)
    await source.stop()
    hub = NodeHub(cache.folder)
    port = await hub.start(LOOPBACK)
    yield Served(cache, commit, HostPort("127.0.0.1", port))
    await hub.stop()


async def test_the_client_gets_everything_from_a_node(served: Served, tmp_path: Path) -> None:
    def ask() -> None:
        folder = tmp_path / "other"
        path = snapshot_download(
            MODEL, revision=served.commit, endpoint=served.endpoint, cache_dir=folder
        )
        names = served.cache.sizes(MODEL, served.commit)
        assert Cache(folder).sizes(MODEL, served.commit) == names
        for name in names:
            assert (Path(path) / name).read_bytes() == served.snapshot(name).read_bytes()
        # By a name that the cache resolves, too.
        one = hf_hub_download(
            MODEL, WEIGHTS, endpoint=served.endpoint, cache_dir=tmp_path / "third"
        )
        assert Path(one).parent.name == served.commit
        api = HfApi(endpoint=served.endpoint, token=False)
        info = api.model_info(MODEL, revision=served.commit, files_metadata=True)
        assert info.sha == served.commit
        assert {file.rfilename: file.size for file in info.siblings or []} == names
        tree = api.list_repo_tree(MODEL, revision=served.commit, recursive=True)
        assert {entry.path for entry in tree} == set(names)

    await asyncio.to_thread(ask)


async def test_a_file_is_named_by_the_hash_in_the_hubs_list(served: Served) -> None:
    def ask() -> None:
        url = hf_hub_url(MODEL, WEIGHTS, revision=served.commit, endpoint=served.endpoint)
        found = get_hf_file_metadata(url)
        content = served.snapshot(WEIGHTS).read_bytes()
        assert found.etag == hashlib.sha256(content).hexdigest()
        assert (found.commit_hash, found.size) == (served.commit, len(content))

    await asyncio.to_thread(ask)
    # A file outside large-file storage has the hash that git gives it.
    blob = b"{}"
    sha1 = hashlib.sha1(b"blob 2\0" + blob, usedforsecurity=False).hexdigest()
    (served.storage / "blobs" / sha1).write_bytes(blob)
    served.snapshot("small.json").symlink_to(f"../../blobs/{sha1}")
    listing = dict(served.cache.listing(MODEL, served.commit) or {})
    listing["small.json"] = type(listing[WEIGHTS])(2, sha1)
    served.cache.listing_path(MODEL, served.commit).unlink()
    served.cache.keep_listing(MODEL, served.commit, listing)
    status, body, headers = await get(served.address, served.path("small.json"))
    assert (status, body, headers["etag"]) == (200, blob, f'"{sha1}"')
    assert headers["x-linked-etag"] == f'"{sha1}"'


async def test_ranges_and_heads(served: Served) -> None:
    content = served.snapshot(LARGE).read_bytes()
    for asked, part in (
        ("bytes=10-19", content[10:20]),
        (f"bytes={CHUNK_BYTES - 5}-", content[CHUNK_BYTES - 5 :]),
        ("bytes=-7", content[-7:]),
    ):
        status, body, headers = await get(served.address, served.path(LARGE), {"Range": asked})
        assert (status, body) == (206, part)
        assert headers["content-range"].endswith(f"/{len(content)}")
    status, _, headers = await get(
        served.address, served.path(LARGE), {"Range": f"bytes={len(content)}-"}
    )
    assert (status, headers["content-range"]) == (416, f"bytes */{len(content)}")
    status, body, headers = await get(served.address, served.path(LARGE), method="HEAD")
    assert (status, body, headers["content-length"]) == (200, b"", str(len(content)))
    assert headers["x-linked-size"] == str(len(content))
    assert headers["x-repo-commit"] == served.commit


async def test_what_is_not_there_has_the_hubs_own_error(served: Served) -> None:
    def ask() -> None:
        api = HfApi(endpoint=served.endpoint, token=False)
        with pytest.raises(RepositoryNotFoundError):
            api.model_info("org/none")
        with pytest.raises(RevisionNotFoundError):
            api.model_info(MODEL, revision="0" * 40)
        with pytest.raises(RemoteEntryNotFoundError):
            url = hf_hub_url(MODEL, "none.json", revision=served.commit, endpoint=served.endpoint)
            get_hf_file_metadata(url)

    await asyncio.to_thread(ask)


async def test_only_whole_files_are_shown(served: Served, tmp_path: Path) -> None:
    blob = served.snapshot(WEIGHTS).resolve()
    content = blob.read_bytes()

    async def shown() -> bool:
        status, _, headers = await get(served.address, served.path(WEIGHTS))
        assert status == 200 or headers["x-error-code"] == "EntryNotFound"
        _, info, _ = await get(served.address, f"/api/models/{MODEL}/revision/{served.commit}")
        assert (WEIGHTS.encode() in info) == (status == 200)
        return status == 200

    assert await shown()
    for wrong in (content[:-1], content + b"x", b""):
        blob.write_bytes(wrong)
        assert not await shown()
    # Whole, but under the name of a file still being fetched, or of another content.
    blob.write_bytes(content)
    for name in (f"{blob.name}.incomplete", "0" * 64):
        other = blob.rename(blob.with_name(name))
        served.snapshot(WEIGHTS).unlink()
        served.snapshot(WEIGHTS).symlink_to(f"../../blobs/{name}")
        assert not await shown()
        other.rename(blob)
    # A copy in the snapshot itself, a link out of the blobs folder, a link in a circle.
    served.snapshot(WEIGHTS).unlink()
    served.snapshot(WEIGHTS).write_bytes(content)
    assert not await shown()
    (tmp_path / blob.name).write_bytes(content)
    for target in (tmp_path / blob.name, served.snapshot(WEIGHTS)):
        served.snapshot(WEIGHTS).unlink()
        served.snapshot(WEIGHTS).symlink_to(target)
        assert not await shown()
    # The blob itself is a link out.
    served.snapshot(WEIGHTS).unlink()
    served.snapshot(WEIGHTS).symlink_to(f"../../blobs/{blob.name}")
    blob.unlink()
    blob.symlink_to(tmp_path / blob.name)
    assert not await shown()
    blob.unlink()
    blob.write_bytes(content)
    assert await shown()


async def test_a_model_whose_list_is_not_kept_is_not_shown(served: Served) -> None:
    listing = served.cache.listing_path(MODEL, served.commit)
    text = listing.read_text()
    for spoilt in (None, "{", "[]", '{"format_version": 99, "files": {}}'):
        listing.unlink(missing_ok=True)
        if spoilt is not None:
            listing.write_text(spoilt)
        status, _, headers = await get(served.address, served.path(WEIGHTS))
        assert (status, headers["x-error-code"]) == (404, "RevisionNotFound")
    listing.write_text(text)
    assert (await get(served.address, served.path(WEIGHTS)))[0] == 200


async def test_a_list_that_names_files_elsewhere_shows_none_of_them(served: Served) -> None:
    listing = served.cache.listing_path(MODEL, served.commit)
    secret = served.cache.folder.parent / "secret.txt"
    names = ("../../../../secret.txt", str(secret), ".hidden", "a/../b")
    files = {name: {"size": 6, "blob_id": "a" * 40} for name in names}
    files["fine.json"] = {"size": 2, "blob_id": 'x"\r\nSet-Cookie: y'}
    served.snapshot("fine.json").write_text("{}")
    served.snapshot(".hidden").write_text("secret")
    listing.write_text(json.dumps({"format_version": 1, "files": files}))
    _, info, _ = await get(served.address, f"/api/models/{MODEL}/revision/{served.commit}")
    assert json.loads(info)["siblings"] == []
    for name in (*names, "fine.json"):
        status, body, _ = await get(served.address, served.path(name))
        assert status == 404
        assert body != b"secret"


@pytest.mark.parametrize(
    "path",
    [
        "/{model}/resolve/{commit}/../../../../../secret.txt",
        "/{model}/resolve/{commit}/..%2f..%2f..%2f..%2f..%2fsecret.txt",
        "/{model}/resolve/{commit}/%2fetc%2fpasswd",
        "/{model}/resolve/{commit}/..%5c..%5csecret.txt",
        "/{model}/resolve/{commit}/config.json%00",
        "/{model}/resolve/{commit}/",
        "/{model}/resolve/..%2f..%2f..%2fsecret.txt/config.json",
        "/{model}/resolve/../config.json",
        "/org/..%2f..%2fsecret.txt/resolve/{commit}/config.json",
        "/../{model}/resolve/{commit}/config.json",
        "/models--org--model/refs/main",
        "/models--org--model/trees/{commit}.json",
        "/models--org--model/shardring/{commit}.json",
        "/models--org--model/blobs/{etag}",
        "/{model}/resolve/{commit}/blobs/{etag}",
        "/models--org--model/resolve/{commit}/config.json",
        "/org--model/resolve/{commit}/config.json",
        "/org/linked/resolve/{commit}/config.json",
        "/api/models",
        "/api/models/",
        "/api/models/org",
        "/api/models/..%2f..",
        "/api/models/{model}/tree/{commit}/..%2f..",
        "/api/models/{model}/refs",
        "/secret.txt",
        "/",
    ],
)
async def test_nothing_else_is_shown(served: Served, path: str) -> None:
    outside = served.cache.folder.parent / "outside"
    served.storage.rename(outside)
    served.storage.mkdir()
    for part in outside.iterdir():
        part.rename(served.storage / part.name)
    # A model's folder that lies somewhere else.
    outside.rmdir()
    outside.symlink_to(served.storage)
    (served.cache.folder / "models--org--linked").symlink_to(outside)
    (served.storage / "shardring").mkdir(exist_ok=True)
    (served.storage / "shardring" / f"{served.commit}.json").write_text("secret")
    etag = served.snapshot(WEIGHTS).resolve().name
    asked = path.format(model=MODEL, commit=served.commit, etag=etag)
    status, body, _ = await get(served.address, asked)
    assert status == 404
    assert b"secret" not in body
    assert (await get(served.address, served.path(WEIGHTS)))[0] == 200


async def test_nothing_can_be_written(served: Served) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        for path in (served.path(WEIGHTS), f"/api/models/{MODEL}"):
            status, _, _ = await get(served.address, path, method=method)
            assert status == 405
    assert served.snapshot(WEIGHTS).exists()


@contextlib.asynccontextmanager
async def slow_reader(served: Served) -> AsyncIterator[asyncio.StreamReader]:
    """Ask for the large file, and read as little of it as can be."""
    reader, writer = await asyncio.open_connection(
        served.address.host, served.address.port, limit=1024
    )
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    writer.write(f"GET {served.path(LARGE)} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    await writer.drain()
    assert await reader.readuntil(b"\r\n") == b"HTTP/1.1 200 OK\r\n"
    try:
        yield reader
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def test_more_bodies_than_may_be_are_put_off(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(node_hub, "MAX_BODIES", 2)
    # So large that neither end's buffers hold it.
    _grow(served, 64 * CHUNK_BYTES)
    hub = NodeHub(served.cache.folder)
    served.address = HostPort("127.0.0.1", await hub.start(LOOPBACK))
    async with contextlib.AsyncExitStack() as readers:
        for _ in range(2):
            await readers.enter_async_context(slow_reader(served))
        status, _, headers = await get(served.address, served.path(WEIGHTS))
        assert (status, headers["retry-after"]) == (503, "1")
        # What is small goes on: metadata, and who only looks.
        assert (await get(served.address, served.path(WEIGHTS), method="HEAD"))[0] == 200
        assert (await get(served.address, f"/api/models/{MODEL}"))[0] == 200

    async def free() -> bool:
        return (await get(served.address, served.path(WEIGHTS)))[0] == 200

    # Readers that hang up make room at once.
    await eventually(free)
    # Stopping waits for no reader.
    async with slow_reader(served):
        async with asyncio.timeout(10):
            await hub.stop()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    with pytest.raises(ConnectionRefusedError):
        await get(served.address, served.path(WEIGHTS))


async def test_a_reader_that_takes_nothing_makes_room_for_another(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_hub, "MAX_BODIES", 1)
    monkeypatch.setattr(hub_protocol, "STALLED_SECONDS", 0.05)
    _grow(served, 64 * CHUNK_BYTES)
    hub = NodeHub(served.cache.folder)
    served.address = HostPort("127.0.0.1", await hub.start(LOOPBACK))

    async def free() -> bool:
        return (await get(served.address, served.path(WEIGHTS)))[0] == 200

    async with slow_reader(served):
        await eventually(free)
        await hub.stop()


def _grow(served: Served, size: int) -> None:
    """Give the large file another size, and the list the same."""
    blob = served.snapshot(LARGE).resolve()
    with blob.open("r+b") as file:
        file.truncate(size)
    path = served.cache.listing_path(MODEL, served.commit)
    listing = dict(served.cache.listing(MODEL, served.commit) or {})
    listing[LARGE] = type(listing[LARGE])(size, blob.name)
    path.unlink()
    served.cache.keep_listing(MODEL, served.commit, listing)


async def test_it_is_served_after_the_nodes_port_or_where_there_is_room(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        hub = NodeHub(tmp_path)
        found = await hub.start(HostPort("127.0.0.1", port - 10))
        assert found not in (0, port)
        await hub.stop()
        with pytest.raises(ListenError, match=str(port)):
            await hub.start(HostPort("127.0.0.1", 1), port)
    assert node_hub.hub_ports(HostPort("::", 52420), 0) == [52430, 0]
    assert node_hub.hub_ports(HostPort("::", 0), 0) == [0]
    assert node_hub.hub_ports(HostPort("::", 65535), 0) == [0]
    assert node_hub.hub_ports(HostPort("::", 52420), 9) == [9]


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
async def test_where_a_node_listens_everywhere_so_does_its_hub() -> None:
    server = HubServer(
        hub_app(Path("none")), HostPort("0.0.0.0", 0), security=Security(insecure=True)
    )
    # Found out without listening on other than loopback.
    made: list[tuple[object, ...]] = []

    def create_server(place: tuple[object, ...], **options: object) -> socket.socket:
        made.append((place[0], options["dualstack_ipv6"]))
        raise OSError(1, "not now")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "create_server", create_server)
        with pytest.raises(ListenError):
            await server.start()
    assert made == [("::", True)]


async def test_a_folder_that_is_not_there_yet_is_served_when_it_is(tmp_path: Path) -> None:
    hub = NodeHub(tmp_path / "none")
    address = HostPort("127.0.0.1", await hub.start(LOOPBACK))
    status, _, headers = await get(address, f"/{MODEL}/resolve/main/config.json")
    assert (status, headers["x-error-code"]) == (404, "RepoNotFound")
    await hub.stop()
