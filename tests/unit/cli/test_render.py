"""Renderings of messages, as they look without a terminal."""

import io

import pytest
from rich.console import Console, RenderableType

from services.cli.names import NodeNames
from services.cli.render.downloads import download_line, downloads_progress, origin
from services.cli.render.instances import (
    completion_line,
    instance_progress,
    instances_table,
    shard_line,
    where,
)
from services.cli.render.nodes import links_matrix, links_table, nodes_table
from services.cli.render.placements import host_lists, placement_table, previews
from services.cli.shell import make_console
from shardring.common.v1 import common_pb2
from shardring.downloads.v1 import downloads_pb2
from shardring.placement.v1 import placement_pb2, placement_service_pb2
from shardring.runner.v1 import runner_pb2
from shardring.topology.v1 import topology_pb2

NODES = [
    topology_pb2.Node(node_id="b" * 32, name="beta", memory_total_bytes=8_000_000_000),
    topology_pb2.Node(
        node_id="a" * 32,
        name="[bold]alpha[/]",
        endpoints=[
            common_pb2.Endpoint(address="fd00::7", port=52420),
            common_pb2.Endpoint(address="10.0.0.7", port=52420),
        ],
        memory_total_bytes=16_000_000_000,
        memory_available_bytes=4_000_000_000,
        backends=[common_pb2.BACKEND_METAL, common_pb2.BACKEND_CPU],
    ),
]


def shown(renderable: RenderableType, width: int = 200) -> list[str]:
    """Return the lines on a console that, unlike the command's own, interprets markup."""
    file = io.StringIO()
    Console(file=file, width=width).print(renderable)
    return [line.rstrip() for line in file.getvalue().splitlines()]


def words(line: str) -> str:
    """Return a line with one space between words."""
    return " ".join(line.split())


def placement(*layers: tuple[int, int]) -> placement_pb2.Placement:
    return placement_pb2.Placement(
        model_id="org/m",
        layer_count=layers[-1][1],
        ranks=[
            placement_pb2.RankAssignment(
                rank=rank,
                node_id=str(rank) * 32,
                node_name=f"n{rank}",
                layers=common_pb2.LayerRange(start=start, end=end),
                hosts=[f"h{rank}{i}:1" for i in range(len(layers))] if len(layers) > 1 else [],
                weight_bytes=1_000_000_000,
                memory_available_bytes=4_000_000_000,
                backend=common_pb2.BACKEND_METAL,
            )
            for rank, (start, end) in enumerate(layers)
        ],
    )


def instance(
    state: runner_pb2.ShardState.ValueType, *layers: tuple[int, int]
) -> runner_pb2.Instance:
    placed = placement(*layers)
    made = runner_pb2.Instance(instance_id="i", placement=placed)
    made.create_time.FromSeconds(1000)
    for rank in placed.ranks:
        made.shards.add(
            rank=rank.rank,
            node_id=rank.node_id,
            layers=rank.layers,
            state=state,
            download_fraction=0.25,
        )
    return made


def test_nodes_by_name_with_markup_left_alone() -> None:
    NODES[1].last_report_time.FromSeconds(1000)
    header, first, second = shown(nodes_table(NODES, now=1003))
    assert header.split() == ["NODE", "ID", "ADDRESS", "MEMORY", "AVAILABLE", "BACKENDS", "SEEN"]
    assert first.startswith("[bold]alpha[/]  aaaaaaaa  [fd00::7]:52420 +1  16.0 GB     4.0 GB")
    assert words(first).endswith("metal, cpu 3 s ago")
    assert second.startswith("beta            bbbbbbbb  -")
    assert "none" in second


def test_nodes_from_a_clock_ahead_are_not_seen_in_the_future() -> None:
    NODES[1].last_report_time.FromSeconds(1000)
    assert shown(nodes_table(NODES[1:], now=900))[1].endswith("0 s ago")


def test_links_are_sorted_and_tell_the_missing_way() -> None:
    links = [
        topology_pb2.Link(source_node_id=source, sink_node_id=sink, sink_address=address)
        for source, sink, address in [
            ("2", "1", "10.0.0.1"),
            ("1", "3", "10.0.0.3"),
            ("1", "2", "10.0.0.2"),
        ]
    ]
    links[0].round_trip.FromMicroseconds(420)
    links[0].kind = topology_pb2.INTERFACE_KIND_THUNDERBOLT
    links[1].kind = 99  # type: ignore[assignment]
    nodes = [topology_pb2.Node(node_id=i, name=f"n{i}") for i in "123"]
    _, *rows = shown(links_table(topology_pb2.Topology(nodes=nodes, links=links)))
    assert [row.split()[:3] for row in rows] == [
        ["n1", "n2", "10.0.0.2"],
        ["n1", "n3", "10.0.0.3"],
        ["n2", "n1", "10.0.0.1"],
    ]
    assert [row.endswith("one-way") for row in rows] == [False, True, False]
    assert "99" in rows[1]
    assert rows[2].split()[3:] == ["thunderbolt", "0.42", "ms", "-"]


def test_links_show_usual_round_trips_speeds_and_rdma() -> None:
    link = topology_pb2.Link(
        source_node_id="1",
        sink_node_id="2",
        sink_address="169.254.1.2",
        throughput_bytes_per_second=1_175_000_000,
        rdma_device="rdma_en3",
    )
    link.round_trip.FromMicroseconds(100)
    link.round_trip_median.FromMicroseconds(420)
    link.throughput_age.FromSeconds(130)
    back = topology_pb2.Link(source_node_id="2", sink_node_id="1", sink_address="169.254.1.1")
    nodes = [topology_pb2.Node(node_id=i, name=f"n{i}") for i in "12"]
    _, there, _ = shown(links_table(topology_pb2.Topology(nodes=nodes, links=[link, back])))
    assert words(there).endswith("0.42 ms 9.4 Gbit/s 2 min ago rdma_en3")


def test_the_matrix_shows_the_fastest_link_of_each_pair() -> None:
    links = [
        topology_pb2.Link(source_node_id=source, sink_node_id=sink, sink_address=address)
        for source, sink, address in [
            ("1", "2", "10.0.0.2"),
            ("1", "2", "169.254.0.2"),
            ("2", "1", "10.0.0.1"),
            ("2", "1", "10.1.0.1"),
            ("1", "3", "10.0.0.3"),
        ]
    ]
    for link, microseconds in zip(links, (300, 900, 400, 250, 500), strict=True):
        link.round_trip.FromMicroseconds(microseconds)
    links[0].throughput_bytes_per_second = 115_000_000
    links[1].throughput_bytes_per_second = 2_500_000_000
    nodes = [topology_pb2.Node(node_id=i, name=f"n{i}") for i in "321"]
    matrix = links_matrix(topology_pb2.Topology(nodes=nodes, links=links))
    assert [words(line) for line in shown(matrix)] == [
        "FROM \\ TO n1 n2 n3",
        "n1 20.0 Gbit/s 0.50 ms",
        "n2 0.25 ms -",
        "n3 - -",
    ]


def test_a_placement_in_rank_order() -> None:
    _, first, second = shown(placement_table(placement((0, 3), (3, 4))))
    assert words(first) == "0 n0 [0,3) 3 1.0 GB 4.0 GB ━━━━ 25 % metal"
    assert second.split()[:4] == ["1", "n1", "[3,4)", "1"]


def test_host_lists() -> None:
    header, first, second = shown(host_lists(placement((0, 3), (3, 4))))
    assert "REACHES 1 AT" in header
    assert first.split() == ["0", "n0", "h00:1", "h01:1"]
    assert second.split() == ["1", "n1", "h10:1", "h11:1"]
    assert shown(host_lists(placement((0, 3)))) == ["A ring of one needs no host list."]


def test_only_the_first_size_that_fits_is_what_is_taken() -> None:
    preview = placement_service_pb2.Preview
    response = placement_service_pb2.PreviewPlacementsResponse(
        previews=[
            preview(node_count=1, refusal=common_pb2.Error(reason="R", message="[No]")),
            preview(node_count=2, placement=placement((0, 1), (1, 2))),
            preview(node_count=3, placement=placement((0, 1), (1, 2), (2, 3))),
        ]
    )
    lines = shown(previews(response))
    assert lines[:2] == ["1 node", "  R  [No]"]
    assert [line.split(" (")[0] for line in lines if "(taken by up and run)" in line] == ["2 nodes"]


def test_instance_progress() -> None:
    made = instance(runner_pb2.SHARD_STATE_DOWNLOADING, (0, 3), (3, 4))
    made.shards[1].state = runner_pb2.SHARD_STATE_LOADED
    made.shards[1].memory_bytes = 5_000_000
    _, first, second = shown(instance_progress(made, [3.2, 61]))
    assert words(first) == "0 n0 [0,3) DOWNLOADING ━━━━ 25 % - 3 s"
    assert words(second) == "1 n1 [3,4) LOADED ━━━━ 25 % 5.0 MB 1 min 1 s"
    assert shard_line(made, made.shards[0]) == "rank 0 on n0: DOWNLOADING 25 %"
    assert shard_line(made, made.shards[1]) == "rank 1 on n1: LOADED, 5.0 MB in memory"
    assert where(made) == "n0 [0,3), n1 [3,4)"


def test_instances_fold_between_ranks_never_inside() -> None:
    made = instance(runner_pb2.SHARD_STATE_WARMING_UP, (0, 3), (3, 4))
    made.error.message, made.error.reason = "Broke [down].", "SHARD_FAILED"
    made.state = runner_pb2.INSTANCE_STATE_STARTING
    lines = shown(instances_table([made], now=1060))
    expected = "i org/m STARTING n0:[0,3):WARMING_UP n1:[3,4):WARMING_UP - - - - 1 min"
    assert words(lines[1]) == expected
    assert lines[2] == "i: Broke [down]. SHARD_FAILED"
    narrow = shown(instances_table([made], now=1060, stacked=True), width=40)
    assert narrow == [
        "i  STARTING  org/m  1 min old",
        "  n0:[0,3):WARMING_UP",
        "  n1:[3,4):WARMING_UP",
        "i: Broke [down]. SHARD_FAILED",
    ]
    assert shown(instances_table([], now=0))[0].startswith("INSTANCE")


@pytest.mark.parametrize(
    ("tokens", "reason", "decode_seconds", "text"),
    [
        (5, runner_pb2.FINISH_REASON_LENGTH, 2, "5 tokens, 2.0 tokens/s, first token after 30 ms"),
        (5, runner_pb2.FINISH_REASON_STOP, 2, "5 tokens, 2.5 tokens/s, first token after 30 ms"),
        (1, runner_pb2.FINISH_REASON_LENGTH, 0, "1 token, first token after 30 ms"),
        (0, runner_pb2.FINISH_REASON_STOP, 0, "0 tokens, first token after 30 ms"),
    ],
)
def test_completion(
    tokens: int, reason: runner_pb2.FinishReason.ValueType, decode_seconds: int, text: str
) -> None:
    completion = runner_pb2.Completion(
        finish_reason=reason, completion_token_count=tokens, prompt_token_count=9
    )
    completion.queue_duration.FromMilliseconds(10)
    completion.prompt_duration.FromMilliseconds(20)
    completion.decode_duration.FromSeconds(decode_seconds)
    line = completion_line(completion)
    assert line.startswith(text + ", prompt of 9 tokens")
    assert line.endswith("limit") == (reason == runner_pb2.FINISH_REASON_LENGTH)


def test_downloads_add_up_bytes_not_per_cent() -> None:
    names = NodeNames([("1", "n1"), ("2", "n2")])
    downloads = [
        downloads_pb2.Download(
            node_id="2",
            state=downloads_pb2.DOWNLOAD_STATE_ONGOING,
            downloaded_bytes=1000,
            total_bytes=9000,
            bytes_per_second=800,
        ),
        downloads_pb2.Download(
            node_id="1",
            state=downloads_pb2.DOWNLOAD_STATE_COMPLETED,
            downloaded_bytes=1000,
            total_bytes=1000,
        ),
        downloads_pb2.Download(node_id="3", state=downloads_pb2.DOWNLOAD_STATE_PENDING),
    ]
    _, unknown, first, second, total = shown(downloads_progress(downloads, names))
    assert words(unknown) == "3 PENDING - ?"
    assert first.split()[:2] == ["n1", "COMPLETED"]
    assert words(second).endswith(" 11 % 9.0 kB 800 B/s 10 s")
    assert "20 % " in total
    assert words(total).endswith(" 10.0 kB 800 B/s 10 s")
    assert download_line(downloads[0], names) == "n2: ONGOING 11 % of 9.0 kB, 800 B/s, 10 s left"
    assert download_line(downloads[2], names) == "3: PENDING"


def test_a_download_says_where_it_comes_from() -> None:
    names = NodeNames([("1", "n1"), ("2", "n2")])
    download = downloads_pb2.Download(
        node_id="1",
        state=downloads_pb2.DOWNLOAD_STATE_ONGOING,
        total_bytes=100,
        files=[
            downloads_pb2.FileProgress(name="a", source_node_id="2", bytes_per_second=5),
            downloads_pb2.FileProgress(name="b", bytes_per_second=5),
            downloads_pb2.FileProgress(name="c"),
        ],
    )
    download.time_left.FromSeconds(70)
    assert origin(download, names) == "n2 and the hub"
    assert download_line(download, names).endswith(", 1 min 10 s left, from n2 and the hub")
    del download.files[:2]
    assert origin(download, names) == ""
    download.state = downloads_pb2.DOWNLOAD_STATE_COMPLETED
    download.received_from_hub_bytes = 3000
    assert origin(download, names) == "the hub"
    download.received_from_nodes_bytes = 5000
    assert origin(download, names) == "the hub (3.0 kB) and nodes (5.0 kB)"


def test_the_progress_of_three_downloads_fits_80_columns() -> None:
    names = NodeNames((str(i), f"studio-{i}") for i in range(3))
    downloads = [
        downloads_pb2.Download(
            node_id=str(i),
            state=downloads_pb2.DOWNLOAD_STATE_ONGOING,
            downloaded_bytes=123 * 10**9,
            total_bytes=404 * 10**9,
            bytes_per_second=123_456_789,
            files=[
                downloads_pb2.FileProgress(name="a", bytes_per_second=5),
                downloads_pb2.FileProgress(name="b", source_node_id=str((i + 1) % 3)),
            ],
        )
        for i in range(3)
    ]
    lines = shown(downloads_progress(downloads, names, width=80, hint="Ctrl-C"), width=80)
    assert len(lines) == 1 + 3 + 1 + 1, "nothing is folded"
    assert lines[-1] == "Ctrl-C"
    assert all(line.endswith(" hub, 1 node") for line in lines[1:4])


def test_off_a_terminal_nothing_is_cut_nor_coloured() -> None:
    made = instance(runner_pb2.SHARD_STATE_READY, *((i, i + 1) for i in range(40)))
    file = io.StringIO()
    make_console(file).print(instances_table([made], now=0))
    text = file.getvalue()
    assert "\x1b" not in text
    assert len(text.splitlines()) == 2
    assert text.count("READY") == 40
