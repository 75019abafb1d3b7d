"""Repositories that lie: a documented refusal each, and nothing outside the cache folder."""

import asyncio
import json
import re
import resource
import struct
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from services.common.addresses import HostPort
from services.common.errors import Reason, ShardringError
from services.downloads.hub import HubServer
from shardring.downloads.v1 import downloads_pb2
from shardring.downloads.v1 import downloads_service_pb2 as pb
from tests.contract.downloads_lab import Lab, lab
from tests.fakes.hostile_hub import COMMIT, HostileModel, hostile_hub

CONFIG = {"model_type": "llama", "num_hidden_layers": 2}
DEEP = b"[" * 1_000_000 + b"]" * 1_000_000
INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"


def weights(header: bytes | None = None, *, length: int | None = None) -> bytes:
    """Return a weight file: a proper one of two layers, or one with this header."""
    if header is None:
        names = ("model.layers.0.w", "model.layers.1.w", "model.embed_tokens.weight", "norm.weight")
        entries = {
            name: {"dtype": "F32", "shape": [2], "data_offsets": [8 * i, 8 * i + 8]}
            for i, name in enumerate(names)
        }
        header = json.dumps(entries).encode()
    return struct.pack("<Q", len(header) if length is None else length) + header + bytes(32)


def model(config: Any = CONFIG, weight: bytes | None = None, **fields: Any) -> HostileModel:
    """Return a model that is fine but for what is given; `files` come on top."""
    text = config if isinstance(config, bytes) else json.dumps(config).encode()
    files = {"config.json": text, WEIGHTS: weight or weights(), **fields.pop("files", {})}
    return HostileModel(files, **fields)


def index(weight_map: Any) -> dict[str, bytes]:
    return {INDEX: json.dumps({"weight_map": weight_map}).encode()}


def header(*spans: tuple[Any, Any], dtype: Any = "F32") -> bytes:
    """Return a weight file whose tensors lie at these places."""
    entries = {
        f"model.layers.{i}.w": {"dtype": dtype, "shape": [2], "data_offsets": span}
        for i, span in enumerate(spans)
    }
    return weights(json.dumps(entries).encode())


MALFORMED = {
    "config-huge": model(sizes={"config.json": 2**30}),
    "config-html": model(b"<html>"),
    "config-deep": model(b'{"a":' + DEEP + b"}"),
    "config-list": model([1]),
    "config-half-a-surrogate": model(b'{"model_type":"\\uD800llama"}'),
    "type-list": model({**CONFIG, "model_type": ["llama"]}),
    "type-long": model({**CONFIG, "model_type": "z" * 1_000_000}),
    "type-controls": model({**CONFIG, "model_type": "\x1b[31mred\n"}),
    "layers-1e9": model({**CONFIG, "num_hidden_layers": 10**9}),
    "layers-inf": model(b'{"model_type":"llama","num_hidden_layers":1e999}'),
    "layers-negative": model({**CONFIG, "num_hidden_layers": -3}),
    "index-outside": model(files=index({"a": "../../x.safetensors"})),
    "index-absolute": model(files=index({"a": "/etc/x.safetensors"})),
    "index-missing": model(files=index({"a": "nowhere.safetensors"})),
    "index-types": model(files=index({"a": 5, "b": ["x"]})),
    "index-deep": model(files={INDEX: DEEP}),
    "index-huge": model(sizes={INDEX: 2**40}),
    "index-5000-files": model(
        files=index({f"t{i}": f"m{i}.safetensors" for i in range(5000)}),
        sizes={f"m{i}.safetensors": 9 for i in range(5000)},
    ),
    "config-digits": model(b'{"model_type":"llama","num_hidden_layers":' + b"9" * 10_000 + b"}"),
    "heads-huge": model({**CONFIG, "num_attention_heads": 2**40}),
    "header-overlap": model(weight=header((0, 16), (8, 32))),
    "header-gap": model(weight=header((0, 8), (16, 32))),
    "header-backwards": model(weight=header((8, 0))),
    "header-negative": model(weight=header((-8, 0))),
    "header-2e70": model(weight=header((0, 2**70))),
    "header-offsets-text": model(weight=header(("0", "8"))),
    "header-dtype-list": model(weight=header((0, 32), dtype=["F32"])),
    "header-null": model(weight=weights(b'{"a":null}')),
    "header-deep": model(weight=weights(b'{"a":' + DEEP + b"}")),
    "header-2e60": model(weight=weights(length=2**60)),
    "header-html": model(weight=weights(b"<html>")),
    "header-half-a-surrogate": model(weight=weights(b'{"\\ud800":{}}')),
    "weights-short": model(weight=b"abc"),
    "weights-cut": model(sizes={WEIGHTS: 100}),
    "size-negative": model(sizes={"config.json": -5}),
    "size-text": model(sizes={"config.json": "12"}),
    "size-float": model(sizes={"config.json": 1e30}),
    "size-null": model(sizes={"config.json": None}),
    "size-2e70": model(sizes={WEIGHTS: 2**70}),
    "names-half-a-surrogate": model(files={"\ud800.json": b"{}"}),
    "files-20000": model(files={f"f{i}.json": b"{}" for i in range(20_000)}),
    "info-html": model(info=b"<html>"),
    "info-list": model(info=b"[]"),
    "info-deep": model(info=DEEP),
    "info-no-commit": model(info=b'{"sha":"../../x","siblings":[]}'),
    "info-odd-files": model(info=b'{"sha":"%s","siblings":[null,5]}' % COMMIT.encode()),
    "tokenizer-huge": model(sizes={"tokenizer_config.json": 2**40}),
    "tokenizer-list": model(files={"tokenizer_config.json": b"[]"}),
}
# Names that leave their folder, hide, or fit no file system are as if not there.
BAD_NAMES = ("../e.json", "/abs.json", "a\\b.json", "new\nline.json", ".hidden.json", "..")
ODD = {
    "names": model(files=dict.fromkeys((*BAD_NAMES, "x" * 300 + ".json", "b\x85.json"), b"{}")),
    "licence": model(card={"license": ["a", {"b": 1}]}),
    "licence-long": model(card={"license": "L" * 1_000_000}),
    "card-list": model(card=[1]),
    "cache-odd": model(
        {
            **CONFIG,
            "num_key_value_heads": [1, "x"],
            "head_dim": -1,
            "layer_types": 7,
            "block_configs": [1, {"attention": 2}],
            "linear_attn_config": {"kda_layers": {}},
            "full_attention_interval": 10**30,
        }
    ),
}
LYING = {
    "endless": model(endless=True),
    "promises": model(
        sizes={"generation_config.json": 100}, files={"generation_config.json": b"{"}
    ),
    "size-0": model(files={"tokenizer.json": b"{}"}, sizes={"tokenizer.json": 0}),
}
MODELS = {
    **MALFORMED,
    **ODD,
    **LYING,
    "missing": model(sizes={"tokenizer.json": 100}),
    "loop": model(loop=True),
    "dribble": model(dribble=True),
}


@pytest_asyncio.fixture
async def here(service: HostPort, tmp_path: Path) -> AsyncIterator[Lab]:
    hub = HubServer(hostile_hub(MODELS), HostPort("127.0.0.1", 0))
    address = await hub.start()
    try:
        async with lab(service, tmp_path / "nodes", f"http://{address}") as here:
            yield here
    finally:
        await hub.stop()


def peak_bytes() -> int:
    """Return the most memory this process, and the workers in it, ever had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


async def refusal(here: Lab, name: str) -> ShardringError:
    request = pb.GetModelRequest(model_id=f"evil/{name}")
    with pytest.raises(ShardringError) as refused:
        await here.remote.unary(here.stub.GetModel, request, timeout=15)
    return refused.value


async def test_what_cannot_be_true_is_malformed_and_says_where(
    here: Lab, caplog: pytest.LogCaptureFixture
) -> None:
    await here.worker()
    before = peak_bytes()
    for name in MALFORMED:
        error = await refusal(here, name)
        assert error.reason is Reason.MODEL_MALFORMED, (name, error)
        assert error.metadata["model_id"] == f"evil/{name}"
        assert error.metadata.get("file") or error.metadata.get("fault"), name
        assert error.message.isprintable(), name
        assert len(error.message) < 400, name
    assert (await refusal(here, "loop")).reason is Reason.HUB_UNREACHABLE
    assert not [record for record in caplog.records if record.exc_info]
    assert peak_bytes() - before < 500 * 10**6


@pytest.mark.parametrize("name", ODD)
async def test_oddities_do_no_harm_and_stay_in_the_cache(here: Lab, name: str) -> None:
    node = await here.worker()
    last = await here.fetch(node, f"evil/{name}")
    assert last.state == downloads_pb2.DOWNLOAD_STATE_COMPLETED, last.error
    written = {path for path in here.folder.parent.rglob("*") if path.is_file()}
    assert all(path.is_relative_to(here.cache(node)) for path in written)
    names = {path.name for path in written if path.parent == Path(last.snapshot_path)}
    assert {"config.json", WEIGHTS} <= names <= {"config.json", WEIGHTS, "tokenizer.json"}
    facts = await here.model(f"evil/{name}")
    assert (facts.license, facts.key_value_bytes_per_token) == ("", 0)


@pytest.mark.parametrize("name", LYING)
async def test_a_body_of_another_size_or_content_than_announced_fails(here: Lab, name: str) -> None:
    node = await here.worker()
    last = await here.fetch(node, f"evil/{name}")
    assert last.state == downloads_pb2.DOWNLOAD_STATE_FAILED
    assert last.error.reason == Reason.DOWNLOAD_FAILED
    assert re.search("another size than it announced|content other than", last.error.message)
    sizes = [path.stat().st_size for path in here.cache(node).rglob("*") if path.is_file()]
    assert sum(sizes) < 2**20, "an endless body must not fill the disk"


async def test_a_listed_file_that_is_gone_is_not_found(here: Lab) -> None:
    node = await here.worker()
    last = await here.fetch(node, "evil/missing")
    assert last.error.reason == Reason.MODEL_NOT_FOUND
    assert "is gone from" in last.error.message


async def test_a_hub_that_dribbles_holds_up_nothing_else(here: Lab) -> None:
    node = await here.worker()
    for revision in range(20):
        await here.start(node, "evil/dribble", revision=f"r{revision}")
    # What the node's other parts need threads for, such as its heartbeats.
    async with asyncio.timeout(5):
        await asyncio.gather(*(asyncio.to_thread(int) for _ in range(20)))
    # The worker stops at once, and the process is not held by its threads.
    async with asyncio.timeout(10):
        await here.stop_worker(node)
