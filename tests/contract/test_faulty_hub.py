"""The faulty hub of the tests is a hub: huggingface_hub takes its answers, and its faults."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

from tests.fakes.faulty_hub import FaultyHub
from tests.fakes.tiny_model import write_model

MODEL = "org/model"
MIDDLE = "model-00002-of-00003.safetensors"


@pytest.fixture
async def hub(tmp_path: Path) -> AsyncIterator[FaultyHub]:
    write_model(tmp_path / "served" / MODEL, layer_bytes=200_000)
    hub = FaultyHub(tmp_path / "served")
    await hub.start()
    yield hub
    await hub.stop()


async def snapshot(hub: FaultyHub, cache: Path, token: str | bool = False) -> Path:
    """Fetch the model with huggingface_hub alone."""
    path = await asyncio.to_thread(
        snapshot_download, MODEL, endpoint=hub.endpoint, cache_dir=cache, token=token
    )
    return Path(path)


async def test_bodies_from_another_host_come_without_the_token(
    hub: FaultyHub, tmp_path: Path
) -> None:
    hub.faults.redirect = True
    path = await snapshot(hub, tmp_path, "secret")
    assert (path / MIDDLE).read_bytes() == (hub.folder / MODEL / MIDDLE).read_bytes()
    bodies = [request for request in hub.asked("body") if request.host == "storage"]
    assert {request.name for request in bodies} >= {MIDDLE}
    assert {request.authorization for request in bodies} == {""}
    assert {request.authorization for request in hub.asked("head")} == {"Bearer secret"}
    sent = sum(request.sent_bytes for request in bodies)
    assert sent == sum(p.stat().st_size for p in (hub.folder / MODEL).glob("*.safetensors"))


async def test_a_tree_comes_in_pages_and_a_long_list_of_files_is_cut(hub: FaultyHub) -> None:
    hub.faults.page_size, hub.faults.listed_files = 2, 3
    api = HfApi(endpoint=hub.endpoint, token=False)
    info = await asyncio.to_thread(api.model_info, MODEL, files_metadata=True)
    assert len(info.siblings or []) == 3
    tree = await asyncio.to_thread(lambda: list(api.list_repo_tree(MODEL, recursive=True)))
    assert len(tree) == 9
    assert len({entry.path for entry in tree}) == 9
    assert len([request for request in hub.listings if "/tree/" in request.name]) == 5


async def test_gated_and_private_models_open_with_their_token(
    hub: FaultyHub, tmp_path: Path
) -> None:
    hub.faults.gated_to = "granted"
    for token in (False, "other"):
        with pytest.raises(GatedRepoError):
            await snapshot(hub, tmp_path / "no", token)
    info = await asyncio.to_thread(HfApi(endpoint=hub.endpoint, token=False).model_info, MODEL)
    assert info.gated == "manual"
    assert (await snapshot(hub, tmp_path / "yes", "granted") / MIDDLE).exists()
    hub.faults.gated_to, hub.faults.private_to = "", "mine"
    with pytest.raises(RepositoryNotFoundError):
        await snapshot(hub, tmp_path / "no")
    assert (await snapshot(hub, tmp_path / "mine", "mine") / MIDDLE).exists()


async def test_main_moves_and_a_commit_stays(hub: FaultyHub, tmp_path: Path) -> None:
    before = await snapshot(hub, tmp_path / "cache")
    moved = tmp_path / "moved"
    shutil.copytree(hub.folder, moved)
    (moved / MODEL / "tokenizer.json").write_text('{"new": 1}')
    hub.push(moved, MODEL)
    after = await snapshot(hub, tmp_path / "cache")
    assert before.name != after.name
    assert (after / "tokenizer.json").read_text() == '{"new": 1}'

    def old() -> str:
        path = hf_hub_download(
            MODEL,
            "tokenizer.json",
            revision=before.name,
            endpoint=hub.endpoint,
            cache_dir=tmp_path / "other",
            token=False,
        )
        return Path(path).read_text()

    assert await asyncio.to_thread(old) == "{}"


async def test_refusals_are_counted_and_a_stated_wait_is_kept(
    hub: FaultyHub, tmp_path: Path
) -> None:
    hub.refuse("body", 429, headers=lambda: {"Retry-After": "0"})
    hub.refuse("head", 503)
    assert (await snapshot(hub, tmp_path) / MIDDLE).exists()
    statuses = [request.status for request in hub.asked("body") + hub.asked("head")]
    assert sorted(set(statuses)) == [200, 429, 503]
    hub.refuse("listing", 502)
    with pytest.raises(HfHubHTTPError):
        await asyncio.to_thread(HfApi(endpoint=hub.endpoint, token=False).model_info, MODEL)


@pytest.mark.parametrize("added", [10, -10])
@pytest.mark.parametrize("unannounced", [True, False])
async def test_a_body_of_another_length_is_refused(
    hub: FaultyHub, tmp_path: Path, added: int, unannounced: bool
) -> None:
    hub.faults.lengthen, hub.faults.lengths, hub.faults.unannounced = added, 1, unannounced
    with pytest.raises(OSError, match="should be of size"):
        await snapshot(hub, tmp_path)


async def test_a_slow_hub_takes_its_time(hub: FaultyHub, tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()
    hub.faults.bytes_per_second = 2e6
    began = loop.time()
    await snapshot(hub, tmp_path)
    size = sum(path.stat().st_size for path in (hub.folder / MODEL).glob("*.safetensors"))
    # The whole of what was allowed; how much more is the machine's affair.
    assert loop.time() - began > size / 2e6 - 0.2
