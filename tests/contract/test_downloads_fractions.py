"""Fractions are bytes on disk of bytes needed, whatever an index or the cache says."""

import asyncio
import json
from pathlib import Path

import pytest
from google.protobuf import json_format
from huggingface_hub import snapshot_download

from shardring.downloads.v1 import downloads_pb2
from tests.contract.downloads_lab import Lab, eventually
from tests.fakes.faulty_hub import FaultyHub
from tests.fakes.tiny_model import safetensors, write_model

COMPLETED = downloads_pb2.DOWNLOAD_STATE_COMPLETED
INDEX = "model.safetensors.index.json"
MIDDLE = "model-00002-of-00003.safetensors"
MODEL = "org/model"
# What an index may say of its total, which is nobody's word but its own.
METADATA = {
    "no-metadata": {},
    "no-total": {"metadata": {}},
    "small-total": {"metadata": {"total_size": 1}},
    "huge-total": {"metadata": {"total_size": 2**62}},
    "odd-total": {"metadata": {"total_size": [-1, None]}},
}
SINGLE = "org/single"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder / MODEL)
    for name, more in METADATA.items():
        write_model(folder / "org" / name)
        index = folder / "org" / name / INDEX
        index.write_text(json.dumps(json.loads(index.read_text()) | more))
    single = folder / SINGLE
    write_model(single)
    for path in single.glob("model*"):
        path.unlink()
    tensors = {f"model.layers.{layer}.w": 1000 for layer in range(4)} | {"model.norm.weight": 16}
    (single / "model.safetensors").write_bytes(safetensors(tensors))
    return folder


def needed_bytes(folder: Path, *without: str) -> int:
    """Return the bytes of a whole model's files, weights and configuration."""
    names = {path.name for path in folder.glob("*.json")} | {
        path.name for path in folder.glob("*.safetensors")
    }
    return sum((folder / name).stat().st_size for name in names.difference(without))


async def test_the_index_s_own_total_counts_for_nothing(here: Lab, models: Path) -> None:
    node = await here.worker()
    for name in METADATA:
        folder = models / "org" / name
        part = await here.fetch(node, f"org/{name}", layers=(1, 3))
        assert part.state == COMPLETED
        ends = {f"model-0000{end}-of-00003.safetensors" for end in (1, 3)}
        fraction = await here.fraction(node, f"org/{name}")
        assert fraction.total_bytes == needed_bytes(folder)
        assert fraction.downloaded_bytes == needed_bytes(folder, *ends)
        assert fraction.fraction == fraction.downloaded_bytes / fraction.total_bytes
        assert (await here.fetch(node, f"org/{name}")).state == COMPLETED
        assert (await here.fraction(node, f"org/{name}")).fraction == 1


async def test_a_repository_without_an_index(here: Lab, models: Path) -> None:
    node = await here.worker()
    assert (await here.fetch(node, SINGLE)).state == COMPLETED
    fraction = await here.fraction(node, SINGLE)
    assert (fraction.fraction, fraction.total_bytes) == (1, needed_bytes(models / SINGLE))


async def test_some_files_that_another_tool_fetched_count_as_some(
    here: Lab, hub: FaultyHub, models: Path
) -> None:
    node = await here.worker()
    await asyncio.to_thread(
        snapshot_download,
        MODEL,
        cache_dir=here.cache(node),
        endpoint=hub.endpoint,
        allow_patterns=[MIDDLE],
    )
    size = (models / MODEL / MIDDLE).stat().st_size

    async def seen() -> bool:
        fraction = await here.fraction(node, MODEL)
        return (fraction.downloaded_bytes, fraction.total_bytes) == (
            size,
            needed_bytes(models / MODEL),
        )

    await eventually(seen)


@pytest.mark.parametrize("gone", ["link", "content"])
async def test_one_file_deleted_behind_our_back_is_noticed(
    here: Lab, models: Path, gone: str
) -> None:
    node = await here.worker()
    file = Path((await here.fetch(node, MODEL)).snapshot_path) / MIDDLE
    (file if gone == "link" else file.resolve()).unlink()

    async def noticed() -> bool:
        found = await here.fraction(node, MODEL)
        # Where the content is still there, it lacks but its link.
        left = needed_bytes(models / MODEL, MIDDLE)
        return found.state != COMPLETED and left <= found.downloaded_bytes < found.total_bytes

    await eventually(noticed)
    assert (await here.fetch(node, MODEL)).state == COMPLETED
    assert (await here.fraction(node, MODEL)).fraction == 1


async def test_kept_facts_of_an_older_version_are_read_anew(here: Lab, models: Path) -> None:
    node = await here.worker()
    part = await here.fetch(node, MODEL, layers=(1, 3))
    model = await here.model(MODEL)
    assert (model.key_value_bytes_per_token, model.tensor_supported) == (4 * 2 * 4 * 2, True)
    await here.stop_worker(node)
    # As the first version wrote it: the message alone, with what there was of it.
    folder = here.cache(node) / "models--org--model" / "shardring"
    kept = folder / f"{part.commit}.json"
    assert json.loads(kept.read_text())["version"] > 1
    old = json_format.MessageToDict(model)
    for field in ("keyValueBytesPerToken", "tensorSupported"):
        del old[field]
    old["license"] = "of-old"
    kept.write_text(json.dumps(old))
    await here.worker(node_id=node)
    # Without the hub's word the old ones still tell how much is needed, and config.json the rest.
    before = await here.model(MODEL)
    assert (await here.fraction(node, MODEL)).total_bytes == needed_bytes(models / MODEL)
    assert (before.license, before.key_value_bytes_per_token) == ("of-old", 64)
    assert before.tensor_supported
    await here.fetch(node, MODEL)
    assert json.loads(kept.read_text())["model"]["license"] == "mit"
