"""Which models are where: a matrix where it fits, a list by node where not; a model's facts."""

import io

from rich.console import Console, RenderableType

from services.cli.names import NodeNames
from services.cli.render.models import facts_table, models_table
from shardring.downloads.v1 import downloads_pb2
from shardring.downloads.v1 import downloads_service_pb2 as pb

LONG = "mlx-community/Qwen3-235B-A22B-Instruct-2507-4bit"


def lines(renderable: RenderableType, width: int) -> list[str]:
    file = io.StringIO()
    Console(file=file, width=width).print(renderable)
    shown = [line.rstrip() for line in file.getvalue().splitlines()]
    assert all(len(line) <= width for line in shown)
    return shown


def fraction(node_id: str, part: float, state: str = "PENDING") -> downloads_pb2.NodeFraction:
    return downloads_pb2.NodeFraction(
        node_id=node_id,
        fraction=part,
        state=downloads_pb2.DownloadState.Value(f"DOWNLOAD_STATE_{state}"),
        downloaded_bytes=round(part * 132_000_000_000),
        total_bytes=132_000_000_000,
    )


def found(nodes: int) -> tuple[pb.ListModelsResponse, list[str], NodeNames]:
    """Return a long name in each state on nodes, and a short one on none but the first."""
    ids = [f"id-{i:02}" for i in range(nodes)]
    states = ["COMPLETED", "ONGOING", "FAILED", "CANCELLED", "PENDING"]
    long = pb.ModelOnNodes(
        model_id=LONG,
        fractions=[
            fraction(node_id, 1 if i % 5 == 0 else 0.5, states[i % 5])
            for i, node_id in enumerate(ids)
        ],
    )
    short = pb.ModelOnNodes(
        model_id="org/[b]small[/b]",
        fractions=[
            downloads_pb2.NodeFraction(
                node_id=ids[0], downloaded_bytes=5, state=downloads_pb2.DOWNLOAD_STATE_PENDING
            )
        ],
    )
    disks = [pb.NodeDisk(node_id=node_id, available_bytes=380_000_000_000) for node_id in ids[:-1]]
    names = NodeNames((node_id, f"studio-{i + 1}") for i, node_id in enumerate(ids))
    return pb.ListModelsResponse(models=[long, short], disks=disks), ids, names


def test_three_nodes_fit_80_columns_as_a_matrix() -> None:
    models, ids, names = found(3)
    header, *rows = lines(models_table(models, ids, names, width=80), 80)
    assert header.split() == ["MODEL", "SIZE", "studio-1", "studio-2", "studio-3"]
    text = " ".join(" ".join(rows).split())
    assert "132 GB 100 % 50 % fetching 50 % failed" in text
    assert "org/[b]small[/b] ? ? - -" in text
    assert rows[-1].split() == ["free", "380", "GB", "380", "GB", "-"]


def test_what_does_not_fit_is_a_list_by_node() -> None:
    models, ids, names = found(12)
    header, first, *rows = lines(models_table(models, ids, names, width=100), 100)
    assert header.split() == ["NODE", "FREE", "MODEL", "SIZE", "HAS"]
    # By name: studio-10 comes before studio-2.
    assert first.split() == ["studio-1", "380", "GB", LONG, "132", "GB", "100", "%"]
    assert rows[0].split() == ["org/[b]small[/b]", "?", "?"]
    assert [row.split()[0] for row in rows[1:4]] == ["studio-10", "studio-11", "studio-12"]
    wide = lines(models_table(models, ids, names, width=300), 300)
    assert wide[0].split()[:2] == ["MODEL", "SIZE"]
    models, ids, names = found(17)
    header, *_ = lines(models_table(models, ids, names, width=10_000), 10_000)
    assert header.split()[0] == "NODE"


def test_a_node_without_a_model_is_listed_too() -> None:
    models, ids, names = found(20)
    shown = lines(models_table(models, [*ids, "other"], names, width=80), 80)
    assert shown[1].split() == ["other", "-", "-"]


def test_facts_that_no_file_tells_are_left_out_or_said_to_be_unknown() -> None:
    model = downloads_pb2.Model(
        model_id="org/a", model_type="t5", layer_count=2, layer_bytes=[1000, 2000]
    )
    facts = [" ".join(line.split()) for line in lines(facts_table(model), 80)]
    assert "architecture t5: mlx-lm does not run it" in facts
    assert "layers 2 of 1.0 kB to 2.0 kB" in facts
    assert "key-value cache not told by its config.json" in facts
    assert "licence none named" in facts
    assert "gated no" in facts
    assert not [fact for fact in facts if fact.startswith(("context", "quantisation"))]
