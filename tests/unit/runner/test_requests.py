"""What clients are given of what the child says, put together where they are behind."""

import asyncio
from collections.abc import Callable
from typing import Any, cast

from services.runner.child_protocol import Event, Finished, Prepare, Prepared, Run, Tokens
from services.runner.domain.request import GenerationRequest, Input, Sampling
from services.runner.requests import Completion, Part, Requests
from services.runner.supervisor import ShardSupervisor

_MOST_PARTS = 512


class Shard:
    """A supervisor whose child prepares at once, and says what the test has it say."""

    instance_id = "instance"
    stall_seconds = last_progress = 1e9
    generating = False

    class ring:
        model_id = "model"

    def __init__(self) -> None:
        self.on_event: Callable[[Event], None] = lambda _: None
        self.running: list[str] = []

    def check_ready(self) -> None:
        pass

    def send(self, command: Any) -> None:
        if isinstance(command, Prepare):
            self.on_event(Prepared(command.request_id, (1, 2)))

    def run(self, run: Run) -> None:
        self.running.append(run.request_id)

    async def ended(self) -> None:
        await asyncio.Event().wait()

    def tokens(self, ids: list[int], logprobs: bool = False) -> None:
        """Have one step give each running sequence some tokens."""
        told = [[i, f"{i} ", -0.5, []] for i in ids] if logprobs else None
        text = "".join(f"{i} " for i in ids)
        self.on_event(Tokens(tuple((name, tuple(ids), text, told) for name in self.running)))

    def finish(self, count: int) -> None:
        for name in self.running:
            self.on_event(Finished(name, "length", "", count, 0, 0.0, 0.0, 0.0))


async def generated(
    choices: int, drive: Callable[[Shard], None], logprobs: int | None = None
) -> list[Part | Completion]:
    """Return what a client is given that looks only once `drive` has had its say."""
    shard = Shard()
    requests = Requests(cast(ShardSupervisor, shard))
    request = GenerationRequest(
        Input(token_ids=(1, 2)),
        Sampling(),
        choice_count=choices,
        top_logprob_count=logprobs,
    )
    stream = requests.generate(request)
    first = asyncio.ensure_future(anext(stream))
    async with asyncio.timeout(10):
        while len(shard.running) < choices:
            await asyncio.sleep(0)
        drive(shard)
        return [await first, *[item async for item in stream]]


async def test_a_client_that_is_behind_gets_all_tokens_in_fewer_messages() -> None:
    count = 3 * _MOST_PARTS - 10

    def drive(shard: Shard) -> None:
        for number in range(count):
            shard.tokens([number])
        shard.finish(count)

    items = await generated(2, drive)
    for choice in (0, 1):
        mine = [item for item in items if item.choice_index == choice]
        *parts, last = mine
        assert isinstance(last, Completion)
        assert last.completion_token_count == count
        tokens = [token for part in parts if isinstance(part, Part) for token in part.token_ids]
        assert tokens == list(range(count))
        text = "".join(part.text for part in parts)
        assert text == "".join(f"{number} " for number in range(count))
        assert len(parts) == 3


async def test_log_probabilities_stay_with_their_tokens() -> None:
    def drive(shard: Shard) -> None:
        shard.tokens([5], logprobs=True)
        shard.tokens([6, 7], logprobs=True)
        shard.finish(3)

    part, completion = await generated(1, drive, logprobs=0)
    assert isinstance(part, Part)
    assert isinstance(completion, Completion)
    assert part.token_ids == (5, 6, 7)
    assert [one.chosen.token_id for one in part.logprobs or ()] == [5, 6, 7]


async def test_without_log_probabilities_there_are_none() -> None:
    def drive(shard: Shard) -> None:
        shard.tokens([5])
        shard.tokens([6])
        shard.finish(2)

    part, _ = await generated(1, drive)
    assert isinstance(part, Part)
    assert part.logprobs is None
