"""What crosses between languages: values, errors, deadlines, cancelling, metadata, keepalive."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from tests.clients.languages import Program, Ran
from tests.clients.scripted import (
    FUTURE,
    LARGE,
    LARGEST,
    LONG_NAME,
    NODE_COUNT,
    TEXT,
    scripted,
    unknown_count,
)
from tests.clients.silent import silent_proxy

# The first of them builds all clients.
pytestmark = pytest.mark.timeout(600)

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def test_sixty_four_bits_text_and_values_of_the_future_are_read(program: Program) -> None:
    async with scripted() as server:
        ran = await program.run("nodes", "--topology", str(server.address))
        figures = f"memory_total_bytes={LARGEST} memory_available_bytes={LARGE}"
        assert ran.lines == [
            f"node n0 [fd00::7]:65535 backends=BACKEND_CPU,{FUTURE} {figures} name={TEXT}",
            f"node n1 [fd00::7]:65535 backends=BACKEND_CPU {figures} name=plain",
        ]
        ran = await program.run("links", "--topology", str(server.address))
        assert ran.lines == [
            f"link n0 n1 fd00::7 kind={FUTURE} round_trip_us=unknown",
            f"link n1 n0 10.0.0.1 kind=INTERFACE_KIND_WIFI round_trip_us={2**33 * 10**6 + 1}",
        ]
        ran = await program.run("preview", "org/m", "--placement", str(server.address))
        assert ran.lines == [
            f"preview nodes=1 SHARDING_PIPELINE {FUTURE} {TEXT}:0-2",
            "preview nodes=2 SHARDING_UNSPECIFIED RING_BACKEND_UNSPECIFIED"
            f" refused FROM_THE_FUTURE: {TEXT}",
        ]


async def test_sixty_four_bits_and_metadata_are_sent(program: Program) -> None:
    async with scripted() as server:
        options = ("--headroom-bytes", str(2**62 + 1), "--min-nodes", "3", "--traceparent", TRACE)
        await program.run("place", TEXT, "--placement", str(server.address), *options)
        (request,) = server.seen.requests
        assert request.model_id == TEXT
        assert request.constraints.headroom_bytes == 2**62 + 1
        assert request.constraints.min_node_count == 3
        assert server.seen.metadata[0]["traceparent"] == TRACE
        assert 0 < server.seen.remaining_seconds[0] <= 60


async def test_a_placement_of_the_future_is_started_as_it_came(program: Program) -> None:
    async with scripted() as server:
        ran = await program.run("start", "facts", "org/m", "--placement", str(server.address))
        assert ran.lines == [
            "placement org/m commit=c0 layer_count=2",
            f"rank 0 n0 {server.address} layers=0-2 weight_bytes={LARGE} name={TEXT}",
            "instance facts INSTANCE_STATE_STARTING",
            f"instance facts {FUTURE}",
            "instance facts INSTANCE_STATE_READY",
            f"head {server.address}",
        ]
        placing, starting = server.seen.requests
        assert placing.request_id == "facts"
        assert starting.placement.ranks[0].weight_bytes == LARGE
        assert starting.placement.ring_backend == FUTURE
        # protobuf.js drops fields that it does not know; docs/clients.md says so.
        assert unknown_count(starting) == (0 if program.name == "node" else 2)
        # The client left the watch once it knew enough.
        assert await asyncio.wait_for(server.seen.ended.get(), 30) == "cancelled"


async def test_an_instance_that_fails_is_told(program: Program) -> None:
    async with scripted() as server:
        ran = await program.run("start", "failing", "org/m", "--placement", str(server.address))
        assert ran.status == 1
        assert ran.out.splitlines()[-1] == "instance failing INSTANCE_STATE_FAILED"
        assert ran.err == f"error UNAVAILABLE FROM_THE_FUTURE: {TEXT}\n  rank=1\n"


async def test_an_answer_streams_with_any_text(program: Program) -> None:
    async with scripted() as server:
        options = ("--node", str(server.address), "--max-tokens", "7", "--seed", str(-LARGE))
        ran = await program.run("generate", "facts", TEXT, *options)
        last = f"prompt_token_count={2**31 - 1} completion_token_count={len(TEXT)}"
        assert ran.lines == [TEXT, f"completion 0 {FUTURE} {last}"]
        (request,) = server.seen.requests
        assert request.input.messages.messages[0].content == TEXT
        assert request.max_token_count == 7
        assert request.sampling.seed == -LARGE


async def test_large_messages_pass_both_ways(program: Program) -> None:
    async with scripted() as server:
        server.topology.names = [LONG_NAME] * NODE_COUNT
        ran = await program.run("nodes", "--topology", str(server.address))
        assert [line.partition("name=")[2] for line in ran.lines] == [LONG_NAME] * NODE_COUNT
        prompt = LONG_NAME * NODE_COUNT
        options = ("--node", str(server.address))
        ran = await program.run("generate", "facts", "-", *options, standard_input=prompt)
        assert ran.lines[0] == TEXT
        assert server.seen.requests[-1].input.messages.messages[0].content == prompt
        # Without --seed there is none, not 0.
        assert not server.seen.requests[-1].sampling.HasField("seed")


async def test_a_typed_error_is_printed_readably(program: Program) -> None:
    async with scripted() as server:
        ran = await program.run("place", "refused", "--placement", str(server.address))
        assert (ran.status, ran.out) == (1, "")
        assert ran.err.splitlines() == [
            f"error UNAVAILABLE TOPOLOGY_GATHERING: Noch nicht, {TEXT}: warte.",
            f"  bytes={LARGEST}",
            f"  node_name={TEXT}",
            "  refusal=NO_NODES",
            "  retry after 1500 ms",
        ]
        ran = await program.run("place", "untyped", "--placement", str(server.address))
        assert ran == Ran(1, "", f"error DATA_LOSS: untyped {TEXT}\n")


async def test_a_deadline_ends_a_call_on_both_sides(programs: list[Program]) -> None:
    async with scripted() as server:
        # Long enough to connect on a busy machine.
        options = ("--node", str(server.address), "--timeout", "6")
        all_ran = await asyncio.gather(
            *(program.run("generate", "silent", "Hi", *options) for program in programs)
        )
        for program, ran in zip(programs, all_ran, strict=True):
            assert ran.status == 1, program.name
            assert ran.err.startswith("error DEADLINE_EXCEEDED: "), program.name
            assert await asyncio.wait_for(server.seen.ended.get(), 30) == "cancelled"
        assert len(server.seen.remaining_seconds) == len(programs)
        assert all(seconds <= 6 for seconds in server.seen.remaining_seconds)


async def test_cancelling_ends_a_generation_on_both_sides(program: Program) -> None:
    async with scripted() as server:
        options = ("--node", str(server.address), "--cancel-after", str(len(TEXT) + 2))
        ran = await program.run("generate", "endless", "Hi", *options)
        assert ran.lines == [TEXT + "……", f"cancelled after {len(TEXT) + 2} messages"]
        assert await asyncio.wait_for(server.seen.ended.get(), 30) == "cancelled"


async def test_silent_servers_are_noticed_and_quiet_ones_are_left_alone(
    programs: list[Program],
) -> None:
    """Pings find out which is which; Shardring's servers take them as often as they come."""
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(scripted())
        proxy = await stack.enter_async_context(silent_proxy(server.address))
        group = await stack.enter_async_context(asyncio.TaskGroup())
        options = ("--keepalive", "1", "--timeout", "100")
        lost = [
            group.create_task(
                program.run("generate", "silent", "Hi", "--node", str(proxy.address), *options)
            )
            for program in programs
        ]
        quiet = [
            group.create_task(
                program.run("generate", "quiet", "Hi", "--node", str(server.address), *options)
            )
            for program in programs
        ]
        for _ in (*lost, *quiet):
            await asyncio.wait_for(server.seen.quiet.acquire(), 60)
        proxy.silence()
        for program, task in zip(programs, lost, strict=True):
            ran = await task
            assert ran.status == 1, program.name
            # Else it would be DEADLINE_EXCEEDED.
            assert ran.err.startswith("error UNAVAILABLE: "), (program.name, ran.err)
        server.seen.release.set()
        for program, task in zip(programs, quiet, strict=True):
            assert (await task).out.startswith(TEXT), (program.name, await task)


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("constructor",),
        ("nodes", "more"),
        ("nodes", "--nonsense", "1"),
        ("nodes", "--timeout", "soon"),
        ("generate", "facts", "Hi", "--seed", "1" + 30 * "0"),
    ],
)
async def test_words_that_make_no_sense_are_refused(
    programs: list[Program], words: tuple[str, ...]
) -> None:
    usages = set()
    for program in programs:
        ran = await program.run(*words)
        assert (ran.status, ran.out) == (2, ""), program.name
        usages.add(ran.err)
    # All languages take the same.
    assert len(usages) == 1
    assert usages.pop().startswith("usage: client COMMAND")
