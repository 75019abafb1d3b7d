"""The service's calls: refusals, facts, lists, and workers that come and go."""

import asyncio
import json
from collections.abc import Awaitable
from contextlib import ExitStack
from pathlib import Path

import pytest

from services.common.addresses import HostPort
from services.common.errors import Reason, ShardringError
from shardring.downloads.v1 import downloads_pb2
from shardring.downloads.v1 import downloads_service_pb2 as pb
from tests.contract.downloads_lab import Lab, downloads_process, eventually, lab
from tests.fakes.faulty_hub import FaultyHub
from tests.fakes.tiny_model import LAYERS, safetensors, write_model

MODEL = "org/model"
FAILED = downloads_pb2.DOWNLOAD_STATE_FAILED
COMPLETED = downloads_pb2.DOWNLOAD_STATE_COMPLETED


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in ("model", "second", "third"):
        write_model(folder / "org" / name)
    bare = folder / "org" / "pickled"
    write_model(bare)
    for weights in [*bare.glob("*.safetensors"), bare / "model.safetensors.index.json"]:
        weights.unlink()
    (bare / "pytorch_model.bin").write_bytes(b"pickle")
    write_model(folder / "org" / "odd")
    (folder / "org" / "odd" / "config.json").write_text(json.dumps({"model_type": "t5x"}))
    for name, text in {
        "deep": "[" * 100_000,
        "layers": json.dumps({"model_type": "llama", "num_hidden_layers": -3}),
        "other": json.dumps({"model_type": "llama", "num_hidden_layers": 2}),
    }.items():
        write_model(folder / "bad" / name)
        (folder / "bad" / name / "config.json").write_text(text)
    write_model(folder / "bad" / "header")
    (folder / "bad" / "header" / "model-00002-of-00003.safetensors").write_bytes(b"\xff" * 5000)
    write_model(folder / "bad" / "gap")
    wrong = safetensors({"model.layers.1.a": 10}) + b"more than the header says"
    (folder / "bad" / "gap" / "model-00002-of-00003.safetensors").write_bytes(wrong)
    return folder


async def test_facts_come_from_the_hub_without_fetching_the_model(
    here: Lab, hub: FaultyHub
) -> None:
    node = await here.worker()
    model = await here.model(MODEL)
    assert (model.layer_count, list(model.layer_bytes)) == (LAYERS, [2000] * LAYERS)
    assert (model.embedding_bytes, model.head_bytes, model.weight_bytes) == (500, 516, 9016)
    assert (model.hidden_size, model.key_value_head_count) == (8, 2)
    assert (model.attention_head_count, model.context_token_count) == (4, 128)
    assert (model.license, model.has_chat_template) == ("mit", True)
    assert (model.engine_supported, model.hidden_bytes_per_value) == (True, 2)
    files = {file.name: file for file in model.files}
    assert "modeling.py" not in files
    assert "README.md" not in files
    assert files["model-00001-of-00003.safetensors"].first_stage
    assert list(files["model-00002-of-00003.safetensors"].layers) == [1, 2]
    assert files["model-00003-of-00003.safetensors"].last_stage
    assert files["config.json"].every_stage
    assert not here.cache(node).exists()
    pinned = await here.model(MODEL, model.commit)
    assert pinned == model


@pytest.mark.parametrize(
    ("model_id", "revision", "reason"),
    [
        ("org/nothing", "", Reason.MODEL_NOT_FOUND),
        (MODEL, "v9", Reason.MODEL_NOT_FOUND),
        (MODEL, "0" * 40, Reason.MODEL_NOT_FOUND),
        ("org/pickled", "", Reason.MODEL_WITHOUT_WEIGHTS),
        ("bad/deep", "", Reason.MODEL_MALFORMED),
        ("bad/layers", "", Reason.MODEL_MALFORMED),
        ("bad/header", "", Reason.MODEL_MALFORMED),
        ("bad/gap", "", Reason.MODEL_MALFORMED),
    ],
)
async def test_models_that_cannot_be_used_say_why(
    here: Lab, model_id: str, revision: str, reason: Reason
) -> None:
    node = await here.worker()
    with pytest.raises(ShardringError) as refused:
        await here.model(model_id, revision)
    assert (refused.value.reason, refused.value.metadata["model_id"]) == (reason, model_id)
    failed = await here.fetch(node, model_id, revision=revision)
    assert (failed.state, failed.error.reason) == (FAILED, reason)
    assert not list(here.cache(node).rglob("blobs/*"))


async def test_a_gated_model_says_so_also_from_disk(here: Lab, hub: FaultyHub) -> None:
    node = await here.worker(token="granted")
    assert not (await here.model(MODEL)).gated
    hub.faults.gated_to = "granted"
    assert (await here.model("org/second")).gated
    assert (await here.fetch(node, "org/second")).state == COMPLETED
    await hub.stop()
    await here.stop_worker(node)
    await here.worker(node_id=node, offline=True)
    kept = await here.model("org/second")
    assert kept.gated
    assert kept.key_value_bytes_per_token == LAYERS * 2 * (2 + 2) * 2
    assert kept.tensor_supported


async def test_an_architecture_the_engine_lacks_is_told_apart(here: Lab) -> None:
    await here.worker()
    assert not (await here.model("org/odd")).engine_supported


async def test_refusals_of_a_client(here: Lab) -> None:
    async def reason(call: Awaitable[object]) -> Reason:
        with pytest.raises(ShardringError) as refused:
            await call
        return refused.value.reason

    node = await here.worker()
    assert await reason(here.start("n-absent", MODEL)) is Reason.WORKER_NOT_ATTACHED
    for model_id in ("", "../../etc", "a/b/c", "org/..", "org/a--b", "org/\n", "x" * 500):
        assert await reason(here.start(node, model_id)) is Reason.INVALID_FIELD
        assert await reason(here.model(model_id)) is Reason.INVALID_FIELD
        assert await reason(here.fraction(node, model_id)) is Reason.INVALID_FIELD
    for revision in ("../main", "/main", "a//b", "a b", ".hidden"):
        assert await reason(here.start(node, MODEL, revision=revision)) is Reason.INVALID_FIELD
    for layers in ((2, 2), (3, 1), (-1, 2)):
        assert await reason(here.start(node, MODEL, layers=layers)) is Reason.INVALID_FIELD
    beyond = await here.fetch(node, MODEL, layers=(0, LAYERS + 1))
    assert (beyond.state, beyond.error.reason) == (FAILED, "INVALID_FIELD")
    assert await reason(here.get("d-none")) is Reason.DOWNLOAD_NOT_FOUND
    cancel = pb.CancelDownloadRequest(download_id="d-none")
    call = here.remote.unary(here.stub.CancelDownload, cancel, timeout=5)
    assert await reason(call) is Reason.DOWNLOAD_NOT_FOUND
    for page in (
        pb.ListDownloadsRequest(page_size=-1),
        pb.ListDownloadsRequest(page_size=1001),
        pb.ListDownloadsRequest(page_token="x"),
    ):
        call_list = here.remote.unary(here.stub.ListDownloads, page, timeout=5)
        assert await reason(call_list) is Reason.INVALID_FIELD


async def test_lists_come_in_pages(here: Lab) -> None:
    node = await here.worker()
    ids = [
        (await here.fetch(node, model)).download_id
        for model in ("org/model", "org/second", "org/third")
    ]
    found, token = [], ""
    while True:
        page = await here.remote.unary(
            here.stub.ListDownloads,
            pb.ListDownloadsRequest(node_id=node, page_size=2, page_token=token),
            timeout=5,
        )
        found += [download.download_id for download in page.downloads]
        if not (token := page.next_page_token):
            break
    assert found == ids[::-1]
    one = pb.ListDownloadsRequest(node_id=node, model_id="org/second")
    listed = await here.remote.unary(here.stub.ListDownloads, one, timeout=5)
    assert [download.download_id for download in listed.downloads] == [ids[1]]

    first = await here.remote.unary(
        here.stub.ListModels, pb.ListModelsRequest(page_size=2), timeout=5
    )
    rest = await here.remote.unary(
        here.stub.ListModels, pb.ListModelsRequest(page_token=first.next_page_token), timeout=5
    )
    models = [*first.models, *rest.models]
    assert [model.model_id for model in models] == ["org/model", "org/second", "org/third"]
    for model in models:
        assert [(f.node_id, f.state) for f in model.fractions] == [(node, COMPLETED)]
        assert model.model.layer_count == LAYERS


async def test_without_workers_nobody_can_read_a_model(hub: FaultyHub, tmp_path: Path) -> None:
    with downloads_process() as alone:
        async with lab(alone, tmp_path, hub.endpoint) as here:
            with pytest.raises(ShardringError) as refused:
                await here.model(MODEL)
            assert refused.value.reason is Reason.NO_WORKERS
            empty = await here.remote.unary(
                here.stub.GetFractions, pb.GetFractionsRequest(model_id=MODEL), timeout=5
            )
            assert not empty.fractions


async def test_a_restarted_service_learns_everything_and_downloads_go_on(
    hub: FaultyHub, tmp_path: Path, models: Path
) -> None:
    write_model(models / "org" / "long", layer_bytes=2 * 2**20)
    with ExitStack() as life:
        address = life.enter_context(downloads_process())
        async with lab(address, tmp_path, hub.endpoint) as here:
            node = await here.worker()
            done = await here.fetch(node, MODEL)
            hub.faults.stall_after = 2**20
            download_id = (await here.start(node, "org/long")).download_id
            watching = asyncio.create_task(here.watch(download_id))
            await asyncio.wait_for(hub.stalled.wait(), 20)

            await asyncio.to_thread(life.close)
            with pytest.raises(ShardringError) as ended:
                await watching
            assert ended.value.reason is Reason.SHUTTING_DOWN
            life.enter_context(downloads_process(address.port))
            await eventually(lambda: here.attached(node))

            assert (await here.fraction(node, MODEL)).state == COMPLETED
            assert await here.get(done.download_id) == done
            assert (await here.model(MODEL)).layer_count == LAYERS
            assert (await here.start(node, "org/long")).download_id == download_id
            hub.faults.stall_after = None
            assert (await here.watch(download_id))[-1].state == COMPLETED


async def test_a_second_worker_with_the_same_id_takes_the_place(
    here: Lab, hub: FaultyHub, tmp_path: Path, service: HostPort
) -> None:
    node = await here.worker()
    await here.fetch(node, MODEL)
    async with lab(service, tmp_path / "clone", hub.endpoint) as clone:
        await clone.worker(node_id=node)

        async def replaced() -> bool:
            return (await here.fraction(node, MODEL)).downloaded_bytes == 0

        await eventually(replaced)


async def test_a_node_that_leaves_takes_its_models_along(here: Lab) -> None:
    node = await here.worker()
    done = await here.fetch(node, MODEL)
    await here.stop_worker(node)

    async def left() -> bool:
        return (await here.fraction(node, MODEL)).fraction == 0.0

    await eventually(left)
    listed = await here.remote.unary(here.stub.ListModels, pb.ListModelsRequest(), timeout=5)
    assert MODEL not in [model.model_id for model in listed.models]
    assert (await here.get(done.download_id)).state == COMPLETED
