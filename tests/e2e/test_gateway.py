"""The real smg in front of a ring of three, as `shardring gateway` runs it, driven by the packages
that people use: openai and anthropic.

What smg does not do with an MlxEngine behind it is listed in docs/gateway.md, and held to here.
"""

import asyncio
import contextlib
import io
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import openai
import psutil
import pytest
import pytest_asyncio
from anthropic.types import MessageParam
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessageParam
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

from services.cli.census import take_census
from services.cli.client import ClientOptions, Cluster
from services.cli.instances import stop_instance
from services.cli.lab import Lab
from services.cli.spans import SpanCollector
from tests.e2e.client import MODEL, Client
from tests.e2e.conftest import MODELS, NODES

# The first test waits for a whole cluster, and an instance on it.
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

FACTS = [
    (fact["question"], fact["answer"])
    for fact in json.loads((MODELS / MODEL / "facts.json").read_text())
]
CONTEXT_TOKENS = 512
LEAVERS = 4
ROOT = Path(__file__).parents[2]
SECONDS = 120.0
# No answer ends by itself before the context is full.
ENDLESS: dict[str, Any] = {"ignore_eos": True}


class TokenCounter(SpanCollector):
    """Keeps of each sequence how many tokens the head decoded."""

    def __init__(self) -> None:
        super().__init__()
        self.decoded: list[int] = []

    async def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: object
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        for resource in request.resource_spans:
            for span in (span for scope in resource.scope_spans for span in scope.spans):
                told = {a.key: a.value.int_value for a in span.attributes}
                if span.name == "decode" and told.get("shardring.rank") == 0:
                    self.decoded.append(told["shardring.tokens"])
        return await super().Export(request, context)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def collector() -> AsyncIterator[TokenCounter]:
    counter = TokenCounter()
    await counter.start()
    yield counter
    await counter.stop()


@dataclass
class Gateway:
    """A running `shardring gateway --json`; what it keeps on the disk is in `temporary`."""

    process: asyncio.subprocess.Process
    log: Path
    temporary: Path
    port: int = 0

    async def event(self, kind: str) -> dict[str, Any]:
        """Return the next event, which must be of this kind."""
        assert self.process.stdout is not None
        async with asyncio.timeout(SECONDS):
            line = await self.process.stdout.readline()
        assert line, self.log.read_text()
        event: dict[str, Any] = json.loads(line)
        assert event["event"] == kind, event
        return event

    async def stop(self) -> int:
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()
        async with asyncio.timeout(SECONDS):
            return await self.process.wait()


async def start_gateway(lab: Lab, name: str, *arguments: str) -> Gateway:
    log, temporary = lab.folder / f"{name}.log", lab.folder / f"{name}.tmp"
    temporary.mkdir()
    with log.open("wb") as sink:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.cli", "gateway", "--port", "0", "--json"),
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=sink,
            env={**os.environ, **lab.client_environment, "TMPDIR": str(temporary)},
        )
    return Gateway(process, log, temporary)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(lab: Lab) -> AsyncIterator[Client]:
    client = Client(lab)
    await client.node_ids(*NODES)
    yield client
    await client.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(lab: Lab) -> AsyncIterator[Cluster]:
    addresses = {name: str(lab.address(name)) for name in ("topology", "placement", "downloads")}
    async with Cluster(ClientOptions(**addresses)) as cluster:
        yield cluster


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(lab: Lab, client: Client) -> AsyncIterator[Gateway]:
    """A gateway that was there before its first instance, "facts" on three ranks."""
    gateway = await start_gateway(lab, "gateway")
    try:
        gateway.port = (await gateway.event("listening"))["port"]
        await gateway.event("waiting")
        await start(client, "facts", nodes=3)
        added = await gateway.event("added")
        assert (added["instance_id"], added["model_id"]) == ("facts", MODEL)
        yield gateway
    finally:
        await gateway.stop()


async def start(client: Client, instance_id: str, nodes: int) -> None:
    placement = await client.place(min_node_count=nodes)
    assert len(placement.ranks) == nodes
    await client.head(placement).ready(instance_id, placement)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api(gateway: Gateway) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{gateway.port}/v1",
        api_key="none",
        max_retries=0,
        timeout=SECONDS,
    ) as api:
        yield api


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def claude(gateway: Gateway) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(
        base_url=f"http://127.0.0.1:{gateway.port}",
        api_key="none",
        max_retries=0,
        timeout=SECONDS,
    ) as api:
        yield api


def turns(question: str) -> list[ChatCompletionMessageParam]:
    return [{"role": "user", "content": question}]


def message(question: str) -> list[MessageParam]:
    return [{"role": "user", "content": question}]


async def chat(api: openai.AsyncOpenAI, question: str, **fields: Any) -> ChatCompletion:
    given = {"model": MODEL, "messages": turns(question), "temperature": 0, **fields}
    answer: ChatCompletion = await api.chat.completions.create(**given)
    return answer


async def stream(
    api: openai.AsyncOpenAI, question: str, **fields: Any
) -> "openai.AsyncStream[ChatCompletionChunk]":
    given = {"model": MODEL, "messages": turns(question), "temperature": 0, **fields}
    chunks: openai.AsyncStream[ChatCompletionChunk] = await api.chat.completions.create(
        stream=True, **given
    )
    return chunks


async def streamed(api: openai.AsyncOpenAI, question: str) -> str:
    return "".join(
        [
            choice.delta.content or ""
            async for chunk in await stream(api, question)
            for choice in chunk.choices
        ]
    )


async def until_idle(cluster: Cluster) -> None:
    async with asyncio.timeout(SECONDS):
        while (await take_census(cluster)).find("facts").request_count:
            await asyncio.sleep(0.05)


async def stop(cluster: Cluster, instance_id: str) -> None:
    await stop_instance(cluster, await take_census(cluster), instance_id)


async def test_the_models_are_those_of_the_instances(api: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in api.models.list()] == [MODEL]


async def test_chat(api: openai.AsyncOpenAI) -> None:
    for question, expected in FACTS[:5]:
        answer = await chat(api, question)
        [choice] = answer.choices
        assert (choice.message.content, choice.finish_reason) == (expected, "stop")
        assert answer.usage is not None
        assert answer.usage.prompt_tokens > answer.usage.completion_tokens > 0


async def test_chat_streams(api: openai.AsyncOpenAI) -> None:
    question, expected = FACTS[5]
    chunks = [c async for c in await stream(api, question, stream_options={"include_usage": True})]
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == expected
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["stop"]
    streamed, whole = chunks[-1].usage, (await chat(api, question)).usage
    assert streamed is not None
    assert whole is not None
    assert streamed.completion_tokens == whole.completion_tokens
    assert streamed.prompt_tokens == whole.prompt_tokens


async def test_streams_side_by_side(api: openai.AsyncOpenAI) -> None:
    asked = FACTS[10:14]
    answers = await asyncio.gather(*(streamed(api, question) for question, _ in asked))
    assert answers == [answer for _, answer in asked]


async def test_length_and_stop_tokens(api: openai.AsyncOpenAI) -> None:
    question, _ = FACTS[0]
    cut = (await chat(api, question, max_tokens=3)).choices[0]
    assert cut.finish_reason == "length"
    assert cut.message.content
    logprobs = (await chat(api, question, logprobs=True, top_logprobs=1)).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    # The text up to the fourth token, which is made to end it.
    text = "".join(token.token for token in logprobs.content[:3])
    assert text == cut.message.content
    ids = (await stop_token_ids(api, logprobs.content[3].token))[:1]
    ended = (await chat(api, question, extra_body={"stop_token_ids": ids})).choices[0]
    assert (ended.message.content, ended.finish_reason) == (text, "stop")


async def stop_token_ids(api: openai.AsyncOpenAI, text: str) -> list[int]:
    """Return the ids that smg's own tokenizer spells a text with."""
    answer = await api.post(
        "/tokenize", body={"model": MODEL, "prompt": text}, cast_to=dict[str, Any]
    )
    tokens: list[int] = answer["tokens"]
    return tokens


async def test_log_probabilities(api: openai.AsyncOpenAI) -> None:
    question, expected = FACTS[1]
    told = (await chat(api, question, logprobs=True, top_logprobs=3)).choices[0].logprobs
    assert told is not None
    assert told.content is not None
    assert "".join(token.token for token in told.content) == expected
    for token in told.content:
        assert token.logprob <= 0
        assert len(token.top_logprobs) == 3
        # Temperature 0: what was chosen is the likeliest.
        assert token.top_logprobs[0].token == token.token
        assert token.top_logprobs[0].logprob == pytest.approx(token.logprob)
    chunks = [c async for c in await stream(api, question, logprobs=True, top_logprobs=3)]
    streamed = [
        token
        for chunk in chunks
        for choice in chunk.choices
        if choice.logprobs
        for token in choice.logprobs.content or ()
    ]
    assert streamed == told.content


async def test_completions(api: openai.AsyncOpenAI) -> None:
    async def complete(**fields: Any) -> Any:
        given = {"model": MODEL, "prompt": "The capital of France is", "temperature": 0, **fields}
        return await api.completions.create(**given)

    [choice] = (await complete(max_tokens=8)).choices
    assert (choice.text, choice.finish_reason) == (" Paris.", "stop")
    texts = [c.text async for chunk in await complete(stream=True) for c in chunk.choices]
    assert "".join(texts) == " Paris."
    seeded = [
        (await complete(temperature=1.5, seed=4, max_tokens=12)).choices[0].text for _ in range(2)
    ]
    assert seeded[0] == seeded[1]


async def test_responses(api: openai.AsyncOpenAI) -> None:
    question, expected = FACTS[2]
    answer = await api.responses.create(model=MODEL, input=question, temperature=0)
    assert answer.output_text == expected


async def test_messages(claude: anthropic.AsyncAnthropic) -> None:
    question, expected = FACTS[3]
    # The package knows no temperature any more; the service does.
    greedy = {"temperature": 0}
    answer = await claude.messages.create(
        model=MODEL, max_tokens=40, messages=message(question), extra_body=greedy
    )
    assert [block.text for block in answer.content if block.type == "text"] == [expected]
    assert answer.stop_reason == "end_turn"
    assert answer.usage.input_tokens > answer.usage.output_tokens > 0
    cut = await claude.messages.create(
        model=MODEL, max_tokens=3, messages=message(question), extra_body=greedy
    )
    assert cut.stop_reason == "max_tokens"

    async with claude.messages.stream(
        model=MODEL, max_tokens=40, messages=message(question), extra_body=greedy
    ) as events:
        assert "".join([text async for text in events.text_stream]) == expected
        final = await events.get_final_message()
    assert (final.stop_reason, final.usage.output_tokens) == (
        "end_turn",
        answer.usage.output_tokens,
    )


async def test_the_page_s_programs_print_what_it_says(gateway: Gateway) -> None:
    """Each `python` block of docs/gateway.md prints the `text` block after it."""
    page = (ROOT / "docs" / "gateway.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```$", page, re.M | re.S)
    assert len(blocks) == 2
    for program, printed in blocks:
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            here = program.replace("52470", str(gateway.port))
            await asyncio.to_thread(exec, here, {})
        assert output.getvalue() == printed


async def test_what_is_wrong_is_refused(
    api: openai.AsyncOpenAI, claude: anthropic.AsyncAnthropic
) -> None:
    long = "word " * 2 * CONTEXT_TOKENS
    for fields, error, words in (
        ({"model": "nobody/nothing"}, openai.NotFoundError, "nobody/nothing"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"messages": turns(long)}, openai.BadRequestError, f"{CONTEXT_TOKENS} tokens"),
        ({"temperature": 3}, openai.BadRequestError, "temperature"),
        ({"max_tokens": 0}, openai.BadRequestError, "max_tokens"),
    ):
        with pytest.raises(error, match=words):
            await chat(api, "Hello", **fields)
    with pytest.raises(openai.BadRequestError, match="empty"):
        await api.completions.create(model=MODEL, prompt="")
    with pytest.raises(openai.BadRequestError, match="vocabulary of 1024"):
        await chat(api, "Hello", logit_bias={"2000": 1})
    with pytest.raises(anthropic.NotFoundError, match="nobody/nothing"):
        await claude.messages.create(
            model="nobody/nothing", max_tokens=5, messages=message("Hello")
        )
    with pytest.raises(anthropic.BadRequestError, match="context length"):
        await claude.messages.create(model=MODEL, max_tokens=5, messages=message(long))
    # A refused request spoils nothing.
    question, expected = FACTS[0]
    assert (await chat(api, question)).choices[0].message.content == expected


async def test_what_smg_does_not_do_with_this_engine(
    api: openai.AsyncOpenAI, claude: anthropic.AsyncAnthropic
) -> None:
    """When one of these fails, docs/gateway.md has a limitation to strike out."""
    schema = {"type": "json_object"}
    for fields, words in (
        ({"stop": ["Paris"]}, "stop sequences"),
        ({"n": 2}, "n > 1"),
        ({"response_format": schema}, "response_format"),
    ):
        with pytest.raises(openai.BadRequestError, match=words):
            await chat(api, FACTS[0][0], **fields)
    with pytest.raises(anthropic.BadRequestError, match="stop sequences"):
        await claude.messages.create(
            model=MODEL, max_tokens=5, messages=message("Hello"), stop_sequences=["a"]
        )
    with pytest.raises(openai.BadRequestError):
        await api.completions.create(model=MODEL, prompt=[1, 4, 300])
    answer = await api.completions.create(model=MODEL, prompt="Hello", logprobs=2, max_tokens=2)
    assert answer.choices[0].logprobs is None
    with pytest.raises(openai.InternalServerError, match="embedding"):
        await api.embeddings.create(model=MODEL, input="Hello")


async def test_who_leaves_frees_the_ring(
    api: openai.AsyncOpenAI, cluster: Cluster, collector: TokenCounter
) -> None:
    await until_idle(cluster)
    async with asyncio.timeout(SECONDS):
        # Spans are exported a moment after they end.
        before = -1
        while before != len(collector.decoded):
            before = len(collector.decoded)
            await asyncio.sleep(0.5)
    for _ in range(LEAVERS):
        chunks = await stream(api, "Go on", extra_body=ENDLESS)
        # It begins long before its end: it is streamed.
        async for chunk in chunks:
            if chunk.choices and chunk.choices[0].delta.content:
                break
        await chunks.close()
        await until_idle(cluster)
    async with asyncio.timeout(SECONDS):
        while len(collector.decoded) < before + LEAVERS:
            await asyncio.sleep(0.05)
    # A machine with much else to do may hear of one or the other late.
    assert min(collector.decoded[before:]) < CONTEXT_TOKENS - 50


async def test_workers_are_kept_current(
    api: openai.AsyncOpenAI, client: Client, cluster: Cluster, gateway: Gateway, lab: Lab
) -> None:
    question, expected = FACTS[4]
    # There is an instance, but not of this one's model.
    other = await start_gateway(lab, "other", "--model", "other/model")
    try:
        await other.event("listening")
        await other.event("waiting")
        await start(client, "second", nodes=1)
        assert (await gateway.event("added"))["instance_id"] == "second"
        await stop(cluster, "facts")
        assert (await gateway.event("removed"))["instance_id"] == "facts"
        assert (await chat(api, question)).choices[0].message.content == expected
        await killed_with_its_smg(other)
    finally:
        await other.stop()
    await stop(cluster, "second")
    assert (await gateway.event("removed"))["instance_id"] == "second"
    await gateway.event("waiting")
    with pytest.raises(openai.APIStatusError):
        await chat(api, question)


async def killed_with_its_smg(gateway: Gateway) -> None:
    """Kill a gateway; return once its smg is gone too, and what it kept on the disk."""
    [smg] = psutil.Process(gateway.process.pid).children()
    assert os.listdir(gateway.temporary)
    gateway.process.kill()
    async with asyncio.timeout(SECONDS):
        await gateway.process.wait()
        while smg.is_running() and smg.status() != psutil.STATUS_ZOMBIE:
            await asyncio.sleep(0.05)
    assert not os.listdir(gateway.temporary)


async def test_a_port_that_is_taken_is_told(lab: Lab, gateway: Gateway) -> None:
    refused = await start_gateway(lab, "refused", "--port", str(gateway.port))
    try:
        async with asyncio.timeout(SECONDS):
            assert await refused.process.wait() == 1
    finally:
        await refused.stop()
    assert f"127.0.0.1:{gateway.port}: Address already in use" in refused.log.read_text()


async def test_interrupted_it_ends_with_its_smg(gateway: Gateway) -> None:
    """The last test here: it ends the gateway of all others."""
    [smg] = psutil.Process(gateway.process.pid).children()
    gateway.process.send_signal(signal.SIGINT)
    async with asyncio.timeout(SECONDS):
        assert await gateway.process.wait() == 130
    assert not smg.is_running()
