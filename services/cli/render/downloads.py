"""Downloads on their way, and which models are where."""

from collections.abc import Mapping, Sequence

from rich.console import RenderableType
from rich.text import Text

from services.cli.names import NodeNames
from services.cli.render.tables import Cell, add_row, bar, dim, new_table, share, state_text
from services.cli.text import percent, size, whole_duration
from shardring.downloads.v1 import downloads_pb2, downloads_service_pb2


def download_state(state: downloads_pb2.DownloadState.ValueType) -> str:
    """Return a download state's name: "ONGOING"; of one not known here, its number."""
    if state not in downloads_pb2.DownloadState.values():
        return str(state)
    return downloads_pb2.DownloadState.Name(state).removeprefix("DOWNLOAD_STATE_")


def downloads_progress(
    downloads: Sequence[downloads_pb2.Download], names: NodeNames
) -> RenderableType:
    """Return one bar a node, and one of all together when there are several."""
    table = new_table("NODE", "STATE", "", ">", ">ON DISK", ">OF", ">SPEED", ">LEFT")
    for download in sorted(downloads, key=lambda download: names.label(download.node_id)):
        add_row(
            table,
            names.label(download.node_id),
            state_text(download_state(download.state)),
            *_figures(download.downloaded_bytes, download.total_bytes, download.bytes_per_second),
        )
    if len(downloads) > 1:
        done = sum(download.downloaded_bytes for download in downloads)
        total = sum(download.total_bytes for download in downloads)
        speed = sum(download.bytes_per_second for download in downloads)
        add_row(table, Text("total", style="bold"), "", *_figures(done, total, speed))
    return table


def download_line(download: downloads_pb2.Download, names: NodeNames) -> str:
    """Return how far a download is as a line of plain text."""
    line = f"{names.label(download.node_id)}: {download_state(download.state)}"
    if download.total_bytes:
        line += f" {share(download.downloaded_bytes, download.total_bytes)}"
        line += f" of {size(download.total_bytes)}"
    return line


def models_table(
    models: Sequence[downloads_service_pb2.ModelOnNodes], node_ids: Sequence[str], names: NodeNames
) -> RenderableType:
    """Return one row a model, one column a node with how much of the model it has."""
    ordered = sorted(node_ids, key=lambda node_id: (names.label(node_id), node_id))
    headers = [f">{names.label(node_id)}" for node_id in ordered]
    table = new_table("MODEL", "TYPE", ">SIZE", ">LAYERS", "ENGINE", *headers)
    for entry in models:
        fractions = {fraction.node_id: fraction for fraction in entry.fractions}
        known = entry.HasField("model")
        add_row(
            table,
            entry.model_id,
            entry.model.model_type if known else dim("?"),
            _model_size(entry),
            str(entry.model.layer_count) if known else dim("?"),
            _engine(entry),
            *(_fraction(fractions, node_id) for node_id in ordered),
        )
    return table


def _figures(done: int, total: int, speed: int) -> tuple[Cell, ...]:
    left = whole_duration((total - done) / speed) if speed > 0 and total > done else ""
    return (
        bar(done / total if total else 0.0, 28),
        share(done, total),
        size(done),
        size(total) if total else dim("?"),
        f"{size(speed)}/s" if speed else "",
        left,
    )


def _model_size(entry: downloads_service_pb2.ModelOnNodes) -> Cell:
    total = max((fraction.total_bytes for fraction in entry.fractions), default=0)
    total = total or entry.model.weight_bytes
    return size(total) if total else dim("?")


def _engine(entry: downloads_service_pb2.ModelOnNodes) -> Cell:
    if not entry.HasField("model"):
        return dim("?")
    if entry.model.engine_supported:
        return Text("yes", style="green")
    return Text("no", style="red")


def _fraction(fractions: Mapping[str, downloads_pb2.NodeFraction], node_id: str) -> Cell:
    fraction = fractions.get(node_id)
    if fraction is None or fraction.state == downloads_pb2.DOWNLOAD_STATE_UNSPECIFIED:
        return dim("-")
    if fraction.state == downloads_pb2.DOWNLOAD_STATE_COMPLETED:
        return Text(percent(1.0), style="green")
    text = Text(percent(fraction.fraction))
    if fraction.state != downloads_pb2.DOWNLOAD_STATE_PENDING:
        text.append(" ").append_text(state_text(download_state(fraction.state)))
    return text
