"""What a node promises to its shards."""

from tests.contract.runner_lab import place, three_nodes


async def test_what_a_live_shard_was_promised_is_reserved() -> None:
    async with three_nodes() as nodes:
        placement = place(nodes[:1], [])
        placement.ranks[0].cache_bytes = 500
        await nodes[0].ready("one", placement)
        assert nodes[0].runner.reserved_bytes() == 1000 + 500
        await nodes[0].stop("one")
        assert nodes[0].runner.reserved_bytes() == 0
