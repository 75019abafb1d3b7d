"""The read-only hub, asked by huggingface_hub itself and by people who mean harm."""

import asyncio
import hashlib
import http.client
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from huggingface_hub import HfApi, get_hf_file_metadata, hf_hub_url, snapshot_download
from huggingface_hub.errors import (
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from services.common.addresses import HostPort
from services.common.server import ListenError
from services.downloads.hub import HubServer, hub_app
from tests.fakes.tiny_model import write_model

MODEL = "org/model"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_model(tmp_path / "served" / MODEL)
    (tmp_path / "served" / MODEL / "original").mkdir()
    (tmp_path / "served" / MODEL / "original" / "params.json").write_text("{}")
    (tmp_path / "secret.txt").write_text("secret")
    return tmp_path / "served"


@pytest.fixture
async def hub(folder: Path) -> AsyncIterator[HostPort]:
    server = HubServer(hub_app(folder), HostPort("127.0.0.1", 0))
    yield await server.start()
    await server.stop()


async def get(
    address: HostPort, path: str, headers: dict[str, str] | None = None, method: str = "GET"
) -> tuple[int, bytes, dict[str, str]]:
    """Ask without a library that would tidy up the path."""

    def ask() -> tuple[int, bytes, dict[str, str]]:
        connection = http.client.HTTPConnection(address.host, address.port, timeout=10)
        connection.request(method, path, headers=headers or {})
        response = connection.getresponse()
        lower = {name.lower(): value for name, value in response.getheaders()}
        body = response.read()
        connection.close()
        return response.status, body, lower

    return await asyncio.to_thread(ask)


async def test_the_clients_calls_are_answered(hub: HostPort, folder: Path, tmp_path: Path) -> None:
    def ask() -> None:
        api = HfApi(endpoint=f"http://{hub}", token=False)
        info = api.model_info(MODEL, files_metadata=True)
        assert info.sha is not None
        assert len(info.sha) == 40
        assert info.card_data is not None
        assert info.card_data.license == "mit"
        served = {file.rfilename: file.size for file in info.siblings or []}
        wanted = {
            path.relative_to(folder / MODEL).as_posix(): path.stat().st_size
            for path in (folder / MODEL).rglob("*")
            if path.is_file() and not path.name.startswith(".")
        }
        assert served == wanted
        assert api.model_info(MODEL, revision=info.sha).sha == info.sha
        recursive = {entry.path for entry in api.list_repo_tree(MODEL, recursive=True)}
        assert recursive == set(wanted) | {"original"}
        top = {entry.path for entry in api.list_repo_tree(MODEL)}
        assert top == recursive - {"original/params.json"}
        below = [entry.path for entry in api.list_repo_tree(MODEL, "original")]
        assert below == ["original/params.json"]
        assert len(api.get_safetensors_metadata(MODEL).weight_map) == 7
        name = "config.json"
        metadata = get_hf_file_metadata(hf_hub_url(MODEL, name, endpoint=f"http://{hub}"))
        content = (folder / MODEL / name).read_bytes()
        assert metadata.etag == hashlib.sha256(content).hexdigest()
        assert (metadata.commit_hash, metadata.size) == (info.sha, len(content))
        path = snapshot_download(MODEL, endpoint=f"http://{hub}", cache_dir=tmp_path / "cache")
        assert Path(path).name == info.sha
        assert (Path(path) / name).read_bytes() == content

    await asyncio.to_thread(ask)


async def test_what_is_not_there_has_the_hubs_own_error(hub: HostPort) -> None:
    def ask() -> None:
        endpoint = f"http://{hub}"
        api = HfApi(endpoint=endpoint, token=False)
        with pytest.raises(RepositoryNotFoundError):
            api.model_info("org/none")
        with pytest.raises(RevisionNotFoundError):
            api.model_info(MODEL, revision="0" * 40)
        with pytest.raises(RemoteEntryNotFoundError):
            get_hf_file_metadata(hf_hub_url(MODEL, "none.json", endpoint=endpoint))

    await asyncio.to_thread(ask)


async def test_a_new_content_is_a_new_commit(hub: HostPort, folder: Path) -> None:
    api = HfApi(endpoint=f"http://{hub}", token=False)
    first = (await asyncio.to_thread(api.model_info, MODEL)).sha
    (folder / MODEL / "tokenizer.json").write_text('{"new": 1}')
    second = (await asyncio.to_thread(api.model_info, MODEL)).sha
    assert first != second
    status, _, headers = await get(hub, f"/{MODEL}/resolve/{first}/config.json")
    assert (status, headers["x-error-code"]) == (404, "RevisionNotFound")


async def test_ranges(hub: HostPort, folder: Path) -> None:
    path = f"/{MODEL}/resolve/main/model-00002-of-00003.safetensors"
    content = (folder / MODEL / "model-00002-of-00003.safetensors").read_bytes()
    status, body, headers = await get(hub, path, {"Range": "bytes=10-19"})
    assert (status, body) == (206, content[10:20])
    assert headers["content-range"] == f"bytes 10-19/{len(content)}"
    status, body, _ = await get(hub, path, {"Range": "bytes=100-"})
    assert (status, body) == (206, content[100:])
    status, _, _ = await get(hub, path, {"Range": f"bytes={len(content)}-"})
    assert status == 416
    status, body, headers = await get(hub, path, method="HEAD")
    assert (status, body, headers["content-length"]) == (200, b"", str(len(content)))


@pytest.mark.parametrize(
    "path",
    [
        "/org/model/resolve/main/../../../secret.txt",
        "/org/model/resolve/main/..%2f..%2f..%2fsecret.txt",
        "/org/model/resolve/main/%2e%2e/%2e%2e/%2e%2e/secret.txt",
        "/org/model/resolve/main//etc/hostname",
        "/org/model/resolve/main/%2fetc%2fhostname",
        "/org/../resolve/main/secret.txt",
        "/../secret/resolve/main/secret.txt",
        "/..%2f/x/resolve/main/secret.txt",
        "/org/model/resolve/main/out.txt",
        "/org/model/resolve/main/outside/secret.txt",
        "/org/linked/resolve/main/secret.txt",
        "/org/model/resolve/main/.gitattributes",
        "/org/model/resolve/main/original",
        "/org/model/resolve/main/",
        "/api/models/org/..",
        "/api/models/org/%2e%2e",
        "/api/models/org/model/tree/main/..%2f..",
        "/secret.txt",
    ],
)
async def test_nothing_outside_the_folder_is_shown(hub: HostPort, folder: Path, path: str) -> None:
    (folder / MODEL / "out.txt").symlink_to(folder.parent / "secret.txt")
    (folder / MODEL / "outside").symlink_to(folder.parent)
    (folder / "org" / "linked").symlink_to(folder.parent)
    status, body, _ = await get(hub, path)
    assert status == 404
    assert body.strip() != b"secret"


async def test_nothing_can_be_written(hub: HostPort) -> None:
    for method in ("POST", "PUT", "DELETE"):
        status, _, _ = await get(hub, f"/{MODEL}/resolve/main/config.json", method=method)
        assert status == 405


async def test_a_taken_port_is_said(hub: HostPort, folder: Path) -> None:
    with pytest.raises(ListenError, match=str(hub.port)):
        await HubServer(hub_app(folder), hub).start()
