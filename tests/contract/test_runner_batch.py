"""Many requests at once on real rings: each gets what it would get alone on one machine."""

import asyncio
import json
import random
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import pytest_asyncio
from mlx_lm import load
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache
from mlx_lm.models.llama import Model as Llama
from mlx_lm.models.llama import ModelArgs
from mlx_lm.utils import save_model

from services.common.errors import Reason, ShardringError
from services.runner.requests import QUEUE_LIMIT
from shardring.common.v1 import common_pb2
from shardring.placement.v1 import placement_pb2
from shardring.runner.v1 import instance_service_pb2 as pb
from shardring.runner.v1 import runner_pb2
from tests.contract.runner_lab import LAYERS, Node, place, refused, start_node, three_nodes
from tests.fakes.files_on_disk import MODEL, FilesOnDisk

pytestmark = pytest.mark.asyncio(loop_scope="module")

# Of the model cut in two, each half takes so many bytes a token, 256 tokens at a time.
TOKEN_BYTES = 4 * 2 * 2 * 16 * 4
ROOM_TOKENS = 1024

Fields = dict[str, Any]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def nodes() -> AsyncIterator[list[Node]]:
    async with three_nodes() as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rings(nodes: list[Node]) -> dict[str, Node]:
    """The heads of four instances, by their ids.

    "one": the model whole. "two" ranks, the second with room for few sequences. "three" ranks,
    unevenly cut. "split": two ranks that hold a half of every layer each.
    """
    two, split = place(nodes[:2], [4]), place(nodes[1:], [4])
    two.ranks[1].cache_bytes = ROOM_TOKENS * TOKEN_BYTES
    split.sharding = common_pb2.SHARDING_TENSOR
    for rank in split.ranks:
        rank.layers.start, rank.layers.end = 0, LAYERS
    placements = {
        "one": place([nodes[2]], []),
        "two": two,
        "three": place(nodes, [1, 5]),
        "split": split,
    }
    heads = {node.node_id: node for node in nodes}
    found = {name: heads[given.ranks[0].node_id] for name, given in placements.items()}
    await asyncio.gather(*(found[name].ready(name, given) for name, given in placements.items()))
    return found


@pytest.fixture(scope="module")
def one(rings: dict[str, Node]) -> Node:
    return rings["one"]


@pytest.fixture(scope="module")
def two(rings: dict[str, Node]) -> Node:
    return rings["two"]


@pytest.fixture(scope="module")
def three(rings: dict[str, Node]) -> Node:
    return rings["three"]


def request(prompt: list[int], count: int, **sampling: Any) -> Fields:
    return {
        "input": runner_pb2.GenerationInput(token_ids=runner_pb2.TokenIds(ids=prompt)),
        "max_token_count": count,
        "sampling": runner_pb2.Sampling(**sampling),
        "stop": runner_pb2.StopConditions(ignore_end_tokens=True),
    }


def prompt_of(chance: random.Random, length: int) -> list[int]:
    return [chance.randrange(20, 1000) for _ in range(length)]


def mixed() -> list[Fields]:
    chance = random.Random(4)
    found = []
    for n in range(24):
        prompt = prompt_of(chance, chance.choice([1, 2, 9, 40, 120, 300]))
        seeded = {"temperature": 1.2, "top_p": 0.9, "seed": n}
        found.append(request(prompt, chance.randint(1, 40), **(seeded if n % 2 else {})))
    return found


async def tokens(node: Node, instance_id: str, fields: Fields) -> list[int]:
    messages = await node.generate(instance_id, **fields)
    return [token for message in messages for token in message.token_ids]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def expected(one: Node) -> list[list[int]]:
    """What each of the mixed requests gets alone, on one machine."""
    found = [await tokens(one, "one", fields) for fields in mixed()]
    assert [len(each) for each in found] == [fields["max_token_count"] for fields in mixed()]
    return found


@pytest.mark.parametrize("ring", ["one", "two", "three", "split"])
async def test_24_at_once_get_what_each_gets_alone(
    ring: str, expected: list[list[int]], rings: dict[str, Node]
) -> None:
    found = await asyncio.gather(*(tokens(rings[ring], ring, fields) for fields in mixed()))
    assert found == expected


async def test_short_requests_come_and_go_beside_a_long_one(three: Node, one: Node) -> None:
    chance = random.Random(5)
    long = request(prompt_of(chance, 40), 440, temperature=1, seed=3)
    stream = three.remote.stream(
        three.instances.Generate, pb.GenerateRequest(instance_id="three", **long), timeout=60
    )
    came = list((await anext(stream)).token_ids)
    ended: list[str] = []

    async def short(n: int) -> None:
        fields = request(prompt_of(chance, 5 + n), 2 + n)
        assert len(await tokens(three, "three", fields)) == 2 + n
        ended.append("short")

    beside = asyncio.gather(*(short(n) for n in range(6)))
    async for message in stream:
        came += message.token_ids
    ended.append("long")
    await beside
    assert ended == ["short"] * 6 + ["long"]
    assert came == await tokens(one, "one", long)


async def done(node: Node, instance_id: str, fields: Fields) -> tuple[list[int], int]:
    """Return the tokens, and how many of the prompt were re-used."""
    messages = await node.generate(instance_id, **fields)
    found = [token for message in messages for token in message.token_ids]
    return found, messages[-1].completion.cached_token_count


async def test_prompts_that_begin_alike_re_use_what_was_computed(three: Node) -> None:
    chance = random.Random(6)
    beginning = prompt_of(chance, 150)
    first = request([*beginning, 30], 10)
    unshared, cached = await done(three, "three", first)
    assert cached == 0
    again, cached = await done(three, "three", first)
    assert (again, cached) == (unshared, 150)
    other = request([*beginning[:100], 40, 41], 10)
    _, cached = await done(three, "three", other)
    assert cached == 100
    # What was re-used is as it was.
    again, cached = await done(three, "three", first)
    assert (again, cached) == (unshared, 150)


async def test_requests_at_once_that_begin_alike_share_it(three: Node, one: Node) -> None:
    beginning = prompt_of(random.Random(7), 200)
    fields = [request([*beginning, 30 + n], 8) for n in range(6)]
    found = await asyncio.gather(*(done(three, "three", each) for each in fields))
    assert sorted(cached for _, cached in found) == [0, *[200] * 5]
    assert [ids for ids, _ in found] == [await tokens(one, "one", each) for each in fields]


async def test_choices_share_the_prompt(three: Node, one: Node) -> None:
    fields = request(prompt_of(random.Random(8), 90), 6, temperature=1.5, seed=11)

    async def choices(node: Node, instance_id: str) -> tuple[dict[int, list[int]], list[int]]:
        found: dict[int, list[int]] = {}
        cached = []
        for message in await node.generate(instance_id, **fields, choice_count=5):
            found.setdefault(message.choice_index, []).extend(message.token_ids)
            if message.HasField("completion"):
                cached.append(message.completion.cached_token_count)
        return found, cached

    found, cached = await choices(three, "three")
    assert sorted(cached) == [0, 89, 89, 89, 89]
    assert sorted(found) == [0, 1, 2, 3, 4]
    assert found[0] != found[1]
    assert found == (await choices(one, "one"))[0]


async def test_more_than_may_wait_are_refused(one: Node) -> None:
    fields = request([50, 60, 70], 500)
    call = one.instances.Generate(pb.GenerateRequest(instance_id="one", **fields, choice_count=16))
    await call.read()
    more = [
        asyncio.create_task(one.generate("one", **fields, choice_count=16))
        for _ in range(QUEUE_LIMIT // 16)
    ]
    with pytest.raises(ShardringError) as refusal:
        await asyncio.gather(*more)
    for task in more:
        task.cancel()
    await asyncio.gather(*more, return_exceptions=True)
    metadata = refused(refusal, Reason.QUEUE_FULL)
    assert int(metadata["queued_count"]) + 16 > QUEUE_LIMIT == int(metadata["queue_limit"])
    call.cancel()


# Room.


async def test_what_a_rank_can_never_hold_is_refused_with_figures(nodes: list[Node]) -> None:
    placement = place(nodes[:1], [])
    placement.ranks[0].cache_bytes = 300 * 2 * TOKEN_BYTES
    head = nodes[0]
    await head.ready("small", placement)
    with pytest.raises(ShardringError) as refusal:
        await head.generate("small", **request([50] * 200, 57))
    assert refused(refusal, Reason.CACHE_TOO_SMALL) == {
        "rank": "0",
        "token_count": "257",
        "needed_bytes": str(512 * 2 * TOKEN_BYTES),
        "limit_bytes": str(300 * 2 * TOKEN_BYTES),
    }
    # As many as there is room for, where no count was asked for.
    fields = request([50] * 200, 0, temperature=3, seed=1)
    assert len(await tokens(head, "small", fields)) == 56
    await head.stop("small")


async def test_requests_wait_for_room(two: Node, one: Node) -> None:
    chance = random.Random(9)
    fields = [request(prompt_of(chance, 250), 20) for _ in range(6)]
    running = asyncio.gather(*(tokens(two, "two", each) for each in fields))
    while not running.done():
        instance = await two.get("two")
        assert instance.load.running_count <= 2
        usage = instance.shards[1].usage
        assert usage.cache_bytes + usage.prefix_cache_bytes <= ROOM_TOKENS * TOKEN_BYTES
        await asyncio.wait([running], timeout=0.1)
    assert await running == [await tokens(one, "one", each) for each in fields]


# Options.


async def start(
    node: Node, instance_id: str, placement: placement_pb2.Placement, **options: int
) -> runner_pb2.Instance:
    wanted = pb.StartInstanceRequest(
        instance_id=instance_id,
        placement=placement,
        options=runner_pb2.InstanceOptions(**options),
    )
    await node.remote.unary(node.instances.StartInstance, wanted, timeout=10)
    return await node.until(
        instance_id, runner_pb2.INSTANCE_STATE_READY, runner_pb2.INSTANCE_STATE_FAILED
    )


def by_mlx_lm(
    folder: Path, prompt: list[int], count: int, *, window: int = 0, bits: int = 0
) -> list[int]:
    """Return what the model and caches of mlx-lm give, one token after the other."""
    model, _ = load(str(folder))
    cache: list[Any] = make_prompt_cache(model)
    if window:
        cache = [RotatingKVCache(window) for _ in cache]
    found: list[int] = []
    for given in (prompt[:-1], *[None] * count):
        inputs = given or [found[-1] if found else prompt[-1]]
        logits = model(mx.array([inputs]), cache=cache)[:, -1]
        if bits:
            maybe_quantize_kv_cache(cache, 0, 32, bits)
        if given is None:
            chosen: Any = mx.argmax(logits).item()
            found.append(chosen)
    return found


async def test_only_the_latest_tokens_are_kept_by_option(nodes: list[Node]) -> None:
    chance = random.Random(10)
    prompts = [prompt_of(chance, length) for length in (5, 60, 200)]
    wanted = [by_mlx_lm(MODEL, prompt, 60, window=48) for prompt in prompts]
    assert wanted[1] != by_mlx_lm(MODEL, prompts[1], 60)
    head = nodes[0]
    instance = await start(head, "window", place(nodes[:2], [3]), max_cache_token_count=48)
    assert instance.state == runner_pb2.INSTANCE_STATE_READY, instance.error
    fields = [request(prompt, 60) for prompt in prompts]
    assert await asyncio.gather(*(tokens(head, "window", each) for each in fields)) == wanted
    await head.stop("window")


async def test_caches_that_cannot_be_quantized_are_refused_at_the_start(nodes: list[Node]) -> None:
    instance = await start(nodes[0], "narrow", place(nodes[:1], []), cache_bits=8)
    assert instance.state == runner_pb2.INSTANCE_STATE_FAILED
    assert "options.cache_bits must be 0 with this model" in str(instance.error)
    assert "heads are 16 values wide" in str(instance.error)
    await nodes[0].stop("narrow")
    with pytest.raises(ShardringError) as refusal:
        await start(nodes[0], "both", place(nodes[:1], []), cache_bits=8, max_cache_token_count=100)
    metadata = refused(refusal, Reason.INVALID_FIELD)
    assert metadata["field"] == "options.max_cache_token_count"


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("wide")
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copy(MODEL / name, folder)
    config = json.loads((MODEL / "config.json").read_text())
    config |= {"head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    (folder / "config.json").write_text(json.dumps(config))
    mx.random.seed(1)
    model = Llama(ModelArgs.from_dict(config))
    model.apply(lambda array: mx.random.normal(array.shape) * 0.2)
    save_model(folder, model)
    return folder


async def test_caches_are_quantized_by_option(wide: Path) -> None:
    prompt = prompt_of(random.Random(4), 60)
    wanted = by_mlx_lm(wide, prompt, 30, bits=4)
    started = [await start_node(f"wide-{name}", FilesOnDisk(wide)) for name in "ab"]
    try:
        head = started[0]
        instance = await start(head, "quantized", place(started, [4]), cache_bits=4)
        assert instance.state == runner_pb2.INSTANCE_STATE_READY, instance.error
        fields = [request(prompt, 30), request(prompt[:5], 10), request(prompt, 30)]
        found = await asyncio.gather(*(done(head, "quantized", each) for each in fields))
        assert [found[0][0], found[2][0]] == [wanted, wanted]
        # Quantized ones are cut back and re-used as well.
        shorter = request([*prompt[:40], 21, 22, 23], 10)
        assert (await done(head, "quantized", shorter))[1] == 40
    finally:
        for node in started:
            await node.runner.close("is stopping")
        for node in started:
            await node.remote.close()
            await node.server.stop()
