"""Start, generate and stop an instance again and again: nothing may stay behind."""

import json
import time

import click

from tests.soak.cluster import MODELS, Cluster, cluster

FACTS = json.loads((MODELS / "shardring" / "tiny-facts" / "facts.json").read_text())
# Python and gRPC get warm, and a node keeps what it knows of its last hundred instances.
_WARM_ROUNDS = 100
# gRPC has more or fewer threads as it sees fit, and so has malloc memory.
_SPARE_THREADS, _SPARE_BYTES = 3, 8_000_000


async def rounds(count: int) -> bool:
    """Run so many rounds, print what nodes hold, and say whether they hold no more in the end."""
    async with cluster() as running:
        await _round(running, 0)
        before, files = running.nodes(), running.temporary_files()
        warm = before
        began = time.monotonic()
        for number in range(1, count + 1):
            await _round(running, number)
            if number == min(_WARM_ROUNDS, count // 2):
                warm = running.nodes()
            if number % max(1, count // 10) == 0:
                click.echo(f"after round {number}, {time.monotonic() - began:.0f} s")
                for name, now in running.nodes().items():
                    click.echo(f"  {name}: {now}")
        after = running.nodes()
        left = running.temporary_files() - files
        click.echo(f"files left in the folder for temporary ones: {sorted(map(str, left)) or 0}")
        sound = not left
        for name, now in after.items():
            grown = now.memory_bytes - warm[name].memory_bytes
            click.echo(f"{name}: before {before[name]}\n{name}: after  {now}")
            click.echo(f"{name}: {grown / 1e6:+.1f} MB in the latter rounds")
            sound = sound and now.descriptors <= max(
                warm[name].descriptors, before[name].descriptors
            )
            sound = sound and now.threads <= warm[name].threads + _SPARE_THREADS
            sound = sound and (now.listening, now.children) == (before[name].listening, 0)
            sound = sound and grown < _SPARE_BYTES
        return sound


async def _round(running: Cluster, number: int) -> None:
    instance_id = f"round-{number}"
    placement = await running.client.place(min_node_count=3, request_id=instance_id)
    head = running.client.head(placement)
    await head.ready(instance_id, placement)
    fact = FACTS[number % len(FACTS)]
    answer = await head.answer(instance_id, fact["question"])
    if answer != fact["answer"]:
        raise AssertionError(f"round {number}: {answer!r} instead of {fact['answer']!r}")
    await head.stop(instance_id)
