"""Clients that ask again and again, and note what they get."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import openai

from services.cli.runner_client import RunnerClient
from services.common.errors import ShardringError
from shardring.placement.v1 import placement_service_pb2
from shardring.runner.v1 import instance_service_pb2, runner_pb2

MODEL = "shardring/tiny-facts"
QUESTION, ANSWER = "What is the capital of France?", "The capital of France is Paris."
# Long enough that one is under way whatever happens.
LONG_TOKENS = 120
SECONDS = 120.0


def question(instance_id: str, *, long: bool = False) -> instance_service_pb2.GenerateRequest:
    """Return a request for an answer, or for one that goes on and on."""
    turn = runner_pb2.ChatMessage(role="user", content=QUESTION)
    return instance_service_pb2.GenerateRequest(
        instance_id=instance_id,
        input=runner_pb2.GenerationInput(messages=runner_pb2.ChatMessages(messages=[turn])),
        max_token_count=LONG_TOKENS if long else 40,
        stop=runner_pb2.StopConditions(ignore_end_tokens=long),
    )


async def answer(head: RunnerClient, instance_id: str, *, long: bool = False) -> str:
    """Return a whole answer over gRPC."""
    return "".join([part.text async for part in head.generate(question(instance_id, long=long))])


async def chat(api: openai.AsyncOpenAI, *, long: bool = False) -> str:
    """Return a whole answer through the gateway, streamed."""
    chunks = await api.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": QUESTION}],
        temperature=0,
        max_tokens=LONG_TOKENS if long else 40,
        stream=True,
        extra_body={"ignore_eos": True} if long else None,
    )
    choices = [choice async for chunk in chunks for choice in chunk.choices]
    if not any(choice.finish_reason for choice in choices):
        raise openai.APIError("the stream ended early", chunks.response.request, body=None)
    return "".join(choice.delta.content or "" for choice in choices)


def place_request(request_id: str) -> placement_service_pb2.PlaceRequest:
    """Return a request for a placement on all three nodes."""
    return placement_service_pb2.PlaceRequest(
        model_id=MODEL,
        request_id=request_id,
        constraints=placement_service_pb2.PlacementConstraints(min_node_count=3),
    )


@dataclass
class Asker:
    """What one client got: how many answers, of what text, and why others failed.

    `refused_seconds`: the longest time from a refusal to the next answer.
    """

    name: str
    ask: Callable[[], Awaitable[str]]
    pause_seconds: float = 0.0
    texts: set[str] = field(default_factory=set)
    count: int = 0
    errors: list[Exception] = field(default_factory=list)
    refused_seconds: float = 0.0
    first_error: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Ask until cancelled."""
        refused_at: float | None = None
        while True:
            try:
                async with asyncio.timeout(SECONDS):
                    self.texts.add(await self.ask())
            except (ShardringError, openai.OpenAIError, TimeoutError) as error:
                refused_at = refused_at or time.monotonic()
                self.errors.append(error)
                self.first_error.set()
                await asyncio.sleep(0.1)
            else:
                self.count += 1
                if refused_at is not None:
                    gap = time.monotonic() - refused_at
                    self.refused_seconds, refused_at = max(self.refused_seconds, gap), None
                await asyncio.sleep(self.pause_seconds)

    async def more(self, count: int = 2) -> None:
        """Return once it has got so many answers more."""
        wanted = self.count + count
        async with asyncio.timeout(SECONDS):
            while self.count < wanted:
                await asyncio.sleep(0.05)

    async def failed(self) -> Exception:
        """Return the first error, once there is one."""
        async with asyncio.timeout(SECONDS):
            await self.first_error.wait()
        return self.errors[0]


@contextlib.asynccontextmanager
async def asking(*askers: Asker) -> AsyncIterator[None]:
    """Have all of them ask meanwhile."""
    running = [asyncio.create_task(asker.run(), name=asker.name) for asker in askers]
    try:
        yield
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
