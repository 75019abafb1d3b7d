"""What instances do, as it looks without a terminal."""

import pytest

from services.cli.render.instances import instances_table
from services.cli.render.top import top_picture
from services.cli.text import rate
from shardring.runner.v1 import runner_pb2
from tests.unit.cli.test_render import instance, shown, words


def at_work() -> runner_pb2.Instance:
    """Return a ring of three that generates, each rank busier than the one before."""
    made = instance(runner_pb2.SHARD_STATE_READY, (0, 10), (10, 20), (20, 28))
    made.instance_id, made.state = "chat", runner_pb2.INSTANCE_STATE_READY
    made.placement.model_id = "mlx-community/Qwen3-0.6B-4bit"
    made.load.running_count, made.load.queued_count = 3, 1
    made.load.completion_tokens_per_second = 52.34
    made.load.prompt_tokens_per_second = 812
    made.load.batch_occupancy = 2.75
    for shard in made.shards:
        shard.memory_bytes = 1_234_000_000
        shard.usage.busy_fraction = 0.25 + shard.rank * 0.375
        shard.usage.cache_bytes = 120_000_000
        shard.usage.cache_limit_bytes = 2_000_000_000
        shard.usage.prefix_cache_bytes = 30_000_000
    return made


def test_top_fits_a_narrow_terminal() -> None:
    lines = shown(top_picture([at_work()], now=1060, width=80), width=80)
    assert lines == [
        "1 instance, 52.3 tokens/s, 3 running, 1 queued",
        "",
        "chat  READY  mlx-community/Qwen3-0.6B-4bit  1 min old",
        "52.3 tokens/s · prompts 812/s · 3 running · 1 queued · 2.8 a step · 3.7 GB",
        "  RANK  NODE  STATE  STAGE USE            MEMORY             CACHE",
        "  0     n0    READY  ━━━            25 %  1.2 GB  120 MB of 2.0 GB",
        "  1     n1    READY  ━━━━━━━╸       62 %  1.2 GB  120 MB of 2.0 GB",
        "  2     n2    READY  ━━━━━━━━━━━━  100 %  1.2 GB  120 MB of 2.0 GB",
    ]


def test_top_tells_more_on_a_wide_terminal() -> None:
    lines = shown(top_picture([at_work()], now=1060, width=120), width=120)
    headers = "RANK NODE LAYERS STATE STAGE USE MEMORY CACHE PREFIXES"
    assert words(lines[4]) == headers
    assert words(lines[5]) == "0 n0 [0,10) READY ━━━ 25 % 1.2 GB 120 MB of 2.0 GB 30.0 MB"


def test_top_of_instances_that_do_nothing_yet_or_no_more() -> None:
    starting = instance(runner_pb2.SHARD_STATE_LOADING, (0, 4))
    starting.state = runner_pb2.INSTANCE_STATE_STARTING
    broken = instance(runner_pb2.SHARD_STATE_FAILED, (0, 4))
    broken.instance_id, broken.state = "broken", runner_pb2.INSTANCE_STATE_FAILED
    broken.error.message, broken.error.reason = "Broke [down].", "SHARD_FAILED"
    picture = top_picture(
        [starting, broken], now=1005, width=80, remarks={"i": "Node n0 [x] does not answer."}
    )
    lines = shown(picture, width=80)
    assert lines[0] == "2 instances, 0 tokens/s, 0 running, 0 queued"
    assert lines[2:4] == ["i  STARTING  org/m  5 s old", "Node n0 [x] does not answer."]
    assert words(lines[5]) == "0 n0 LOADING - - -"
    assert lines[7:9] == ["broken  FAILED  org/m  5 s old", "broken: Broke [down]. SHARD_FAILED"]
    assert words(lines[10]) == "0 n0 FAILED - - -"


def test_top_of_a_cache_without_a_limit_and_of_nothing() -> None:
    made = at_work()
    made.shards[0].usage.cache_limit_bytes = 0
    lines = shown(top_picture([made], now=1060, width=80), width=80)
    assert lines[5].endswith("  120 MB")
    assert shown(top_picture([], now=0, width=80)) == [
        "0 instances, 0 tokens/s, 0 running, 0 queued"
    ]


def test_ps_tells_what_heads_say() -> None:
    line = shown(instances_table([at_work()], now=1060))[1]
    assert words(line).endswith("n2:[20,28):READY 3.7 GB 52.3 3 1 1 min")
    narrow = shown(instances_table([at_work()], now=1060, stacked=True), width=80)
    assert narrow[1] == (
        "  52.3 tokens/s · prompts 812/s · 3 running · 1 queued · 2.8 a step · 3.7 GB"
    )
    assert narrow[2:] == [
        "  n0:[0,10):READY",
        "  n1:[10,20):READY",
        "  n2:[20,28):READY",
    ]


@pytest.mark.parametrize(
    ("per_second", "text"),
    [(0, "0"), (-1, "0"), (0.4, "0.4"), (99.94, "99.9"), (99.95, "100"), (1240, "1240")],
)
def test_rate(per_second: float, text: str) -> None:
    assert rate(per_second) == text
