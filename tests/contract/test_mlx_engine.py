"""mlx.grpc.engine.MlxEngine over a real ring of three: what gateways call."""

import asyncio
import hashlib
import io
import zipfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
import pytest_asyncio
from smg_grpc_proto import mlx_engine_pb2 as pb
from smg_grpc_proto import mlx_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from services.common.addresses import HostPort
from services.common.channel import Remote
from services.common.errors import Reason, ShardringError
from services.common.status import error_from_rpc
from services.runner.rpc.engine_ports import FIRST_PORT, LAST_PORT, EnginePorts
from services.runner.rpc.mlx_engine import CHUNK_BYTES, METADATA_KEY
from shardring.runner.v1 import runner_pb2
from tests.contract.runner_lab import FACTS, Node, ask, place, refused, text, three_nodes
from tests.fakes.files_on_disk import MODEL

pytestmark = pytest.mark.asyncio(loop_scope="module")

SECONDS = 60


class Engine:
    """A client of MlxEngine at one port; `instance_id` goes into the calls' metadata."""

    def __init__(self, port: int, instance_id: str = "") -> None:
        self.remote = Remote("mlx engine", [HostPort("127.0.0.1", port)])
        self.stub = mlx_engine_pb2_grpc.MlxEngineStub(self.remote.channel)
        self._metadata = ((METADATA_KEY, instance_id),) if instance_id else ()

    def call(self, **fields: Any) -> Any:
        """Start a Generate."""
        request = pb.GenerateRequest(**fields)
        return self.stub.Generate(request, timeout=SECONDS, metadata=self._metadata)

    async def generate(self, **fields: Any) -> list[pb.GenerateResponse]:
        """Return all messages of a Generate. Raises the ShardringError that was meant."""
        try:
            return [message async for message in self.call(**fields)]
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, service="mlx engine", address="") from error

    async def ask(self, method: str, request: Any) -> Any:
        """Call a method that has one answer."""
        return await getattr(self.stub, method)(request, timeout=SECONDS, metadata=self._metadata)


@asynccontextmanager
async def engine(port: int, instance_id: str = "") -> AsyncIterator[Engine]:
    client = Engine(port, instance_id)
    yield client
    await client.remote.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def head() -> AsyncIterator[Node]:
    """The head of "ring", on three ranks, and of "alone", on this one."""
    async with three_nodes() as nodes:
        nodes[0].runner.on_head = EnginePorts(nodes[0].runner, "127.0.0.1").serve
        await asyncio.gather(
            nodes[0].ready("ring", place(nodes, [1, 5])),
            nodes[0].ready("alone", place(nodes[:1], [])),
        )
        yield nodes[0]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ring(head: Node) -> AsyncIterator[Engine]:
    async with engine(await engine_port(head, "ring")) as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(MODEL)


async def engine_port(node: Node, instance_id: str, *, gone: bool = False) -> int:
    """Return an instance's port, once it has one, or once it is `gone`."""
    async for view in node.runner.watch(instance_id):
        if (view.mlx_engine_port == 0) is gone:
            return view.mlx_engine_port
    return 0


async def until_idle(node: Node, instance_id: str) -> None:
    async with asyncio.timeout(20):
        while (await node.get(instance_id)).request_count:
            await asyncio.sleep(0.02)


async def ending(call: Any) -> grpc.StatusCode:
    """Read a stream to its end; return the status it ends with."""
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def tokenized(ids: list[int]) -> dict[str, Any]:
    return {"tokenized": pb.TokenizedInput(input_ids=ids)}


def chat_ids(tokenizer: PreTrainedTokenizerBase, question: str) -> list[int]:
    turns = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    ids: list[int] = tokenizer.encode(prompt, add_special_tokens=False)
    return ids


GREEDY = pb.SamplingParams(temperature=0)


async def test_tokens_come_as_they_are_generated(
    ring: Engine, tokenizer: PreTrainedTokenizerBase
) -> None:
    question, answer = FACTS[0]
    ids = chat_ids(tokenizer, question)
    *chunks, last = await ring.generate(
        request_id="a", **tokenized(ids), sampling_params=GREEDY, stream=True
    )
    tokens = [token for message in chunks for token in message.chunk.token_ids]
    assert tokenizer.decode(tokens) == answer
    assert all(message.WhichOneof("response") == "chunk" for message in chunks)
    assert [message.chunk.completion_tokens for message in chunks][-1] == len(tokens)
    assert {message.chunk.prompt_tokens for message in chunks} == {len(ids)}
    done = last.complete
    assert not done.output_ids
    assert (done.finish_reason, done.prompt_tokens) == ("stop", len(ids))
    assert done.completion_tokens == len(tokens)
    # The model's own end is no condition of the request's.
    assert not done.HasField("matched_stop_token_id")


async def test_without_stream_all_comes_with_the_end(
    head: Node, ring: Engine, tokenizer: PreTrainedTokenizerBase
) -> None:
    question, answer = FACTS[1]
    params = pb.SamplingParams(temperature=0, logprobs=2)
    [message] = await ring.generate(
        request_id="b", **tokenized(chat_ids(tokenizer, question)), sampling_params=params
    )
    done = message.complete
    assert tokenizer.decode(done.output_ids) == answer
    logprobs = done.output_logprobs
    assert list(logprobs.token_ids) == list(done.output_ids)
    assert len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == len(done.output_ids)
    for token, logprob, top in zip(
        logprobs.token_ids, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
    ):
        # Greedy: what was chosen is the likeliest.
        assert (top.token_ids[0], top.values[0]) == (token, logprob)
        assert len(top.token_ids) == len(top.values) == 2
    own = await head.generate("ring", input=ask(question), top_logprob_count=2)
    assert [one.chosen.logprob for m in own for one in m.logprobs] == list(logprobs.token_logprobs)


async def test_streamed_log_probabilities_are_the_same(
    ring: Engine, tokenizer: PreTrainedTokenizerBase
) -> None:
    ids = chat_ids(tokenizer, " ".join(question for question, _ in FACTS[:8]))
    params = pb.SamplingParams(temperature=0, logprobs=1)
    [whole] = await ring.generate(request_id="c", **tokenized(ids), sampling_params=params)
    *chunks, last = await ring.generate(
        request_id="c", **tokenized(ids), sampling_params=params, stream=True
    )
    streamed = [x for m in chunks for x in m.chunk.output_logprobs.token_logprobs]
    assert streamed == list(whole.complete.output_logprobs.token_logprobs)
    assert not last.complete.HasField("output_logprobs")
    # The second time the prompt had been computed already.
    assert 0 < last.complete.cached_tokens < len(ids)


async def test_text_is_tokenized_here(head: Node, ring: Engine) -> None:
    params = pb.SamplingParams(temperature=0, max_tokens=5)
    [message] = await ring.generate(
        request_id="d", text="The capital of France is", sampling_params=params
    )
    own = await head.generate("ring", input=text("The capital of France is"), max_token_count=5)
    assert list(message.complete.output_ids) == [token for m in own for token in m.token_ids]


async def test_what_ends_an_answer(ring: Engine, tokenizer: PreTrainedTokenizerBase) -> None:
    ids = chat_ids(tokenizer, FACTS[0][0])
    [whole] = await ring.generate(request_id="e", **tokenized(ids), sampling_params=GREEDY)
    tokens = list(whole.complete.output_ids)

    params = pb.SamplingParams(temperature=0, max_tokens=3)
    [message] = await ring.generate(request_id="e", **tokenized(ids), sampling_params=params)
    assert (message.complete.finish_reason, message.complete.output_ids) == ("length", tokens[:3])

    params = pb.SamplingParams(temperature=0, stop_token_ids=[tokens[3]])
    [message] = await ring.generate(request_id="e", **tokenized(ids), sampling_params=params)
    assert (message.complete.finish_reason, message.complete.output_ids) == ("stop", tokens[:3])
    assert message.complete.matched_stop_token_id == tokens[3]

    params = pb.SamplingParams(temperature=0, max_tokens=len(tokens) + 5, ignore_eos=True)
    [message] = await ring.generate(request_id="e", **tokenized(ids), sampling_params=params)
    assert (message.complete.finish_reason, len(message.complete.output_ids)) == (
        "length",
        len(tokens) + 5,
    )


async def test_any_seed_repeats_an_answer(ring: Engine) -> None:
    async def answer(**fields: Any) -> list[int]:
        params = pb.SamplingParams(max_tokens=12, ignore_eos=True, **fields)
        [message] = await ring.generate(request_id="f", text="Some words", sampling_params=params)
        return list(message.complete.output_ids)

    answers = [await answer(seed=seed) for seed in (-(2**31), -1, 0, 7, 7)]
    assert answers[3] == answers[4]
    assert len({*map(tuple, answers)}) == 4
    # Without a temperature it is 1: sampled, and not alike twice.
    assert len({tuple(await answer()) for _ in range(3)}) > 1


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"min_p": 2}, "min_p"),
        ({"repetition_penalty": -1}, "repetition_penalty"),
        ({"frequency_penalty": 9}, "frequency_penalty"),
        ({"presence_penalty": -9}, "presence_penalty"),
        ({"logit_bias": {5: 1000}}, "logit_bias"),
        ({"logit_bias": {-5: 1}}, "logit_bias"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 2**32 - 1}, "max_tokens"),
        ({"stop_token_ids": [2**32 - 1]}, "stop_token_ids"),
        ({"logprobs": 21}, "top_logprob_count"),
        ({"logprobs": -1}, "top_logprob_count"),
    ],
)
async def test_absurd_settings_are_refused(
    ring: Engine, params: dict[str, Any], field: str
) -> None:
    with pytest.raises(ShardringError) as error:
        await ring.generate(
            request_id="g", **tokenized([1]), sampling_params=pb.SamplingParams(**params)
        )
    assert field in refused(error, Reason.INVALID_FIELD)["field"]


async def test_prompts_that_cannot_be_are_refused(ring: Engine) -> None:
    for fields, reason in (
        ({}, Reason.INVALID_FIELD),
        (tokenized([]), Reason.PROMPT_EMPTY),
        (tokenized([2**32 - 1]), Reason.INVALID_FIELD),
        (tokenized([5] * 512), Reason.PROMPT_TOO_LONG),
    ):
        with pytest.raises(ShardringError) as error:
            await ring.generate(request_id="h", **fields, sampling_params=GREEDY)
        refused(error, reason)


ENDLESS = pb.SamplingParams(temperature=0, ignore_eos=True)


async def test_abort_ends_exactly_the_requests_named(head: Node, ring: Engine) -> None:
    async def begun(request_id: str, params: pb.SamplingParams) -> Any:
        call = ring.call(request_id=request_id, text="Go on", sampling_params=params, stream=True)
        assert (await call.read()).HasField("chunk")
        return call

    some = pb.SamplingParams(temperature=0, ignore_eos=True, max_tokens=60)
    others = [await begun(name, some) for name in ("two", "other")]
    aborted = await asyncio.gather(*(begun(name, ENDLESS) for name in ("one", "same", "same")))
    await ring.ask("Abort", pb.AbortRequest(request_ids=["one", "same", "nobody", ""]))
    for call in aborted:
        assert await ending(call) is grpc.StatusCode.CANCELLED
    for call in others:
        messages = [message async for message in call]
        assert messages[-1].complete.finish_reason == "length"
    await until_idle(head, "ring")
    # That id may be used, and ended, again.
    call = await begun("one", ENDLESS)
    await ring.ask("Abort", pb.AbortRequest(request_ids=["one"]))
    assert await ending(call) is grpc.StatusCode.CANCELLED
    await ring.ask("Abort", pb.AbortRequest(request_ids=["one"]))
    await until_idle(head, "ring")


async def test_a_dropped_stream_frees_the_ring(head: Node, ring: Engine) -> None:
    for streamed in (True, False):
        call = ring.call(request_id="i", text="Go on", sampling_params=ENDLESS, stream=streamed)
        if streamed:
            await call.read()
        call.cancel()
        await until_idle(head, "ring")
    assert (await ring.ask("GetServerInfo", pb.GetServerInfoRequest())).active_requests == 0


async def test_it_tells_of_its_model_and_itself(ring: Engine) -> None:
    info = await ring.ask("GetModelInfo", pb.GetModelInfoRequest())
    assert info == pb.GetModelInfoResponse(
        model_path="shardring/tiny-facts",
        served_model_name="shardring/tiny-facts",
        is_generation=True,
        max_context_length=512,
        max_req_input_len=511,
        vocab_size=1024,
        model_type="llama",
        architectures=["LlamaForCausalLM"],
        eos_token_ids=[2],
        bos_token_id=1,
        pad_token_id=0,
    )
    server = await ring.ask("GetServerInfo", pb.GetServerInfoRequest())
    assert server.server_type == "shardring"
    assert server.uptime_seconds > 0
    assert (await ring.ask("HealthCheck", pb.HealthCheckRequest())).healthy


async def test_the_tokenizer_comes_whole_and_nothing_else(ring: Engine) -> None:
    request = common_pb2.GetTokenizerRequest()
    chunks = [chunk async for chunk in ring.stub.GetTokenizer(request, timeout=SECONDS)]
    data = b"".join(chunk.data for chunk in chunks)
    assert [bool(chunk.sha256) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].sha256 == hashlib.sha256(data).hexdigest()
    assert max(len(chunk.data) for chunk in chunks) <= CHUNK_BYTES
    archive = zipfile.ZipFile(io.BytesIO(data))
    assert sorted(archive.namelist()) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    for name in archive.namelist():
        assert archive.read(name) == (MODEL / name).read_bytes()


async def test_at_the_node_s_port_the_call_says_which_instance(head: Node) -> None:
    async with engine(head.server.port) as either, engine(head.server.port, "alone") as alone:
        health = await either.ask("HealthCheck", pb.HealthCheckRequest())
        assert not health.healthy
        assert "alone, ring" in health.message
        with pytest.raises(ShardringError) as error:
            await either.generate(request_id="j", text="Hello", sampling_params=GREEDY)
        assert refused(error, Reason.INSTANCE_AMBIGUOUS) == {
            "instance_ids": "alone, ring",
            "metadata_key": METADATA_KEY,
        }
        assert (await alone.ask("HealthCheck", pb.HealthCheckRequest())).healthy
        [message] = await alone.generate(request_id="j", text="Hello", sampling_params=GREEDY)
        assert message.HasField("complete")
    async with engine(head.server.port, "nobody") as nobody:
        with pytest.raises(ShardringError) as error:
            await nobody.generate(request_id="j", text="Hello", sampling_params=GREEDY)
        refused(error, Reason.INSTANCE_NOT_READY)


async def test_an_instance_s_port_lives_while_it_is_ready(head: Node) -> None:
    placement = place([head], [])
    await head.ready("brief", placement)
    port = await engine_port(head, "brief")
    assert FIRST_PORT <= port <= LAST_PORT
    assert port not in (await engine_port(head, "ring"), await engine_port(head, "alone"))
    async with engine(port) as brief:
        assert (await brief.ask("HealthCheck", pb.HealthCheckRequest())).healthy
        call = brief.call(request_id="k", text="Go on", sampling_params=ENDLESS, stream=True)
        await call.read()
        await head.stop("brief")
        await ending(call)
        await engine_port(head, "brief", gone=True)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await brief.ask("HealthCheck", pb.HealthCheckRequest())
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    # Started again it is found where it was, unless somebody else took that.
    await head.ready("brief", placement)
    async with engine(await engine_port(head, "brief")) as brief:
        assert (await brief.ask("HealthCheck", pb.HealthCheckRequest())).healthy
    await head.stop("brief")
    state = (await head.get("brief")).state
    assert state == runner_pb2.INSTANCE_STATE_STOPPED
