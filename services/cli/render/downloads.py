"""Downloads and verifications on their way."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from services.cli.names import NodeNames
from services.cli.render.tables import Cell, add_row, bar, dim, new_table, share, state_text
from services.cli.text import count, listed, percent, size, whole_duration
from shardring.downloads.v1 import downloads_pb2, downloads_service_pb2

_HUB = "the hub"
# What fits a terminal of 80 columns beside the figures, or one of 120.
_BAR, _WIDE_BAR, _WIDE = 10, 28, 110


def download_state(state: downloads_pb2.DownloadState.ValueType) -> str:
    """Return a download state's name: "ONGOING"; of one not known here, its number."""
    if state not in downloads_pb2.DownloadState.values():
        return str(state)
    return downloads_pb2.DownloadState.Name(state).removeprefix("DOWNLOAD_STATE_")


def downloads_progress(
    downloads: Sequence[downloads_pb2.Download],
    names: NodeNames,
    *,
    width: int = 80,
    hint: str = "",
) -> RenderableType:
    """Return one bar a node, one of all together when there are several, and a hint below.

    `width`: of the terminal, in columns.
    """
    table = new_table("NODE", "STATE", "", ">", ">OF", ">SPEED", ">LEFT", "FROM")
    bar_width = _WIDE_BAR if width >= _WIDE else _BAR
    for one in sorted(downloads, key=lambda one: names.label(one.node_id)):
        add_row(
            table,
            names.label(one.node_id),
            state_text(download_state(one.state)),
            bar(one.downloaded_bytes / one.total_bytes if one.total_bytes else 0.0, bar_width),
            *_figures(one.downloaded_bytes, one.total_bytes, one.bytes_per_second, _left(one)),
            origin(one, names) if width >= _WIDE else _short_origin(one, names),
        )
    if len(downloads) > 1:
        done = sum(one.downloaded_bytes for one in downloads)
        total = sum(one.total_bytes for one in downloads)
        # All are there when the last one is.
        left = max((left for one in downloads if (left := _left(one)) is not None), default=None)
        add_row(
            table,
            Text("total", style="bold"),
            "",
            bar(done / total if total else 0.0, bar_width),
            *_figures(done, total, sum(one.bytes_per_second for one in downloads), left),
            "",
        )
    return Group(table, dim(hint)) if hint else table


def download_line(download: downloads_pb2.Download, names: NodeNames) -> str:
    """Return how far a download is as a line of plain text."""
    line = f"{names.label(download.node_id)}: {download_state(download.state)}"
    if download.total_bytes:
        line += f" {share(download.downloaded_bytes, download.total_bytes)}"
        line += f" of {size(download.total_bytes)}"
    if download.bytes_per_second:
        line += f", {size(download.bytes_per_second)}/s"
    if (left := _left(download)) is not None:
        line += f", {whole_duration(left)} left"
    if source := origin(download, names):
        line += f", from {source}"
    return line


def origin(download: downloads_pb2.Download, names: NodeNames) -> str:
    """Return where a download comes from: "the hub", names of nodes, or both; once it has ended,
    how much came from where. Empty when nothing did."""
    if download.state == downloads_pb2.DOWNLOAD_STATE_ONGOING:
        nodes, hub = _sources(download)
        places = sorted(names.label(node_id) for node_id in nodes)
        return listed([*places, _HUB] if hub else places, 3)
    parts = (
        (download.received_from_hub_bytes, _HUB),
        (download.received_from_nodes_bytes, "nodes"),
    )
    came = [(amount, place) for amount, place in parts if amount]
    if len(came) == 1:
        return came[0][1]
    return listed([f"{place} ({size(amount)})" for amount, place in came])


def _short_origin(download: downloads_pb2.Download, names: NodeNames) -> str:
    """Return where an ongoing download comes from in a dozen characters or so."""
    if download.state != downloads_pb2.DOWNLOAD_STATE_ONGOING:
        return ""
    nodes, hub = _sources(download)
    if not hub and len(nodes) == 1:
        return names.label(nodes.pop())
    places = ["hub"] if hub else []
    return ", ".join([*places, count(len(nodes), "node")] if nodes else places)


def _sources(download: downloads_pb2.Download) -> tuple[set[str], bool]:
    """Return the ids of the nodes that files are being fetched from, and if some are of the hub."""
    nodes = {file.source_node_id for file in download.files if file.source_node_id}
    hub = any(file.bytes_per_second and not file.source_node_id for file in download.files)
    return nodes, hub


def verification_line(
    model_id: str, label: str, verification: downloads_service_pb2.Verification
) -> str:
    """Return what verifying a model on a node found, in a line of plain text for each thing."""
    lines = [f"{label}: {model_id}: {_verdict(verification)}"]
    if corrupt := verification.corrupt_files:
        lines += [f"{label}: {model_id}: corrupt and removed: {name}" for name in corrupt]
        lines.append(
            f"{label}: fetch what was removed: shardring download {model_id} --node {label}"
        )
    if unknown := verification.unverifiable_files:
        lines.append(
            f"{label}: {model_id}: no hash is known of {listed(unknown)}; to fetch anew what "
            "cannot be told, remove the model and download it"
        )
    return "\n".join(lines)


def verifying_progress(rows: Sequence[tuple[str, str, int, int]], *, width: int) -> RenderableType:
    """Return one bar a node. A row: label, what it is at, bytes read, and bytes in all."""
    table = new_table("NODE", "", ">", ">OF", "READING")
    for label, model_id, done, total in rows:
        add_row(
            table,
            label,
            bar(done / total if total else 0.0, _WIDE_BAR if width >= _WIDE else _BAR),
            share(done, total),
            size(total) if total else dim("?"),
            model_id,
        )
    return table


def verifying_line(label: str, model_id: str, done: int, total: int) -> str:
    """Return how far a verification is as a line of plain text."""
    return f"{label}: reading {model_id}, {share(done, total)} of {size(total)}"


def _verdict(verification: downloads_service_pb2.Verification) -> str:
    read = size(verification.total_bytes)
    if verification.corrupt_files:
        return f"{count(len(verification.corrupt_files), 'corrupt file')} in {read}"
    if verification.unverifiable_files:
        return f"nothing wrong found in {read}"
    return f"all {read} are as they should be"


def _figures(done: int, total: int, speed: int, left: float | None) -> tuple[Cell, ...]:
    return (
        percent(done / total) if total else "-",
        size(total) if total else dim("?"),
        f"{size(speed)}/s" if speed else "",
        "" if left is None else whole_duration(left),
    )


def _left(download: downloads_pb2.Download) -> float | None:
    """Return the seconds until a download is COMPLETED; None while that is not known."""
    if download.state != downloads_pb2.DOWNLOAD_STATE_ONGOING:
        return None
    if download.HasField("time_left"):
        return download.time_left.ToNanoseconds() / 1e9
    missing = download.total_bytes - download.downloaded_bytes
    if download.bytes_per_second > 0 and missing > 0:
        return missing / download.bytes_per_second
    return None
