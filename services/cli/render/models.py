"""Which models are where, and what a model is like."""

from collections.abc import Iterable, Mapping, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from services.cli.names import NodeNames
from services.cli.render.downloads import download_state
from services.cli.render.nodes import MATRIX_NODES
from services.cli.render.tables import Cell, add_row, dim, new_table
from services.cli.text import count, percent, size
from services.common.ranges import ranges
from shardring.downloads.v1 import downloads_pb2, downloads_service_pb2

# A model's name needs about this much of a line to be read; it is folded beyond.
_NAME_WIDTH = 26
_GAP = 2
_STATES = {
    downloads_pb2.DOWNLOAD_STATE_ONGOING: ("fetching", "cyan"),
    downloads_pb2.DOWNLOAD_STATE_FAILED: ("failed", "bold red"),
}


def models_table(
    found: downloads_service_pb2.ListModelsResponse,
    node_ids: Sequence[str],
    names: NodeNames,
    *,
    width: int,
) -> RenderableType:
    """Return which node has how much of which model, and how much room its disk has.

    A row a model and a column a node where that fits `width`; else a row for each model of each
    node.
    """
    ordered = sorted(node_ids, key=lambda node_id: (names.label(node_id), node_id))
    free = {disk.node_id: disk.available_bytes for disk in found.disks}
    cells = {
        (entry.model_id, fraction.node_id): _fraction(fraction)
        for entry in found.models
        for fraction in entry.fractions
        if fraction.state != downloads_pb2.DOWNLOAD_STATE_UNSPECIFIED
    }
    if len(ordered) <= MATRIX_NODES and _matrix_width(ordered, cells, names) <= width:
        return _matrix(found.models, ordered, cells, free, names)
    return _by_node(found.models, ordered, cells, free, names)


def facts_table(model: downloads_pb2.Model) -> RenderableType:
    """Return what a model's own files say, a fact a row; what they do not say is left out."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, _GAP, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, fact in _facts(model):
        add_row(table, name, fact)
    return table


def model_size(entry: downloads_service_pb2.ModelOnNodes) -> int:
    """Return the bytes of all files of a model; 0 when no node knows."""
    total = max((fraction.total_bytes for fraction in entry.fractions), default=0)
    return total or entry.model.weight_bytes


def _facts(model: downloads_pb2.Model) -> Iterable[tuple[str, Cell]]:
    yield "model", model.model_id
    yield "commit", model.commit
    runs = Text("mlx-lm runs it", style="green")
    if not model.engine_supported:
        runs = Text("mlx-lm does not run it", style="red")
    yield "architecture", Text(f"{model.model_type}: ").append_text(runs)
    yield "size", _sizes(model)
    if model.quantization:
        yield "quantisation", model.quantization
    yield "layers", _layers(model)
    if model.context_token_count:
        yield "context", f"{model.context_token_count:,} tokens"
    if per_token := model.key_value_bytes_per_token:
        text = f"{size(per_token)} a token"
        if tokens := model.context_token_count:
            text += f", {size(per_token * tokens)} at full context"
        yield "key-value cache", text
    else:
        yield "key-value cache", dim("not told by its config.json")
    if model.HasField("cuts"):
        yield "stages", _cuts(model)
    yield "tensor split", "yes" if model.tensor_supported else "no"
    yield "chat template", "yes" if model.has_chat_template else "no"
    yield "licence", model.license or dim("none named")
    yield "gated", "yes: fetching it takes a token that may read it" if model.gated else "no"


def _cuts(model: downloads_pb2.Model) -> str:
    allowed = model.cuts.layers
    if len(allowed) == model.layer_count - 1:
        return "cut before any layer"
    if not allowed:
        return f"one only: {model.cuts.obstacle}"
    return f"cut before layers {ranges(allowed)} only: {model.cuts.obstacle}"


def _sizes(model: downloads_pb2.Model) -> str:
    total = sum(file.size_bytes for file in model.files)
    parts = f"embedding {size(model.embedding_bytes)}, head {size(model.head_bytes)}"
    return f"{size(total)} in {count(len(model.files), 'file')}; {parts}"


def _layers(model: downloads_pb2.Model) -> str:
    small, large = min(model.layer_bytes, default=0), max(model.layer_bytes, default=0)
    each = (
        f"{size(small)} each" if size(small) == size(large) else f"{size(small)} to {size(large)}"
    )
    text = f"{model.layer_count} of {each}"
    if model.hidden_size:
        text += f", {model.hidden_size} wide"
    if model.attention_head_count:
        text += f", {count(model.attention_head_count, 'head')}"
    if model.key_value_head_count:
        text += f", {model.key_value_head_count} for keys and values"
    return text


def _matrix(
    models: Sequence[downloads_service_pb2.ModelOnNodes],
    node_ids: Sequence[str],
    cells: Mapping[tuple[str, str], Text],
    free: Mapping[str, int],
    names: NodeNames,
) -> Table:
    table = new_table("MODEL", ">SIZE", *(f">{names.label(node_id)}" for node_id in node_ids))
    for entry in models:
        add_row(
            table,
            entry.model_id,
            _size(entry),
            *(cells.get((entry.model_id, node_id), dim("-")) for node_id in node_ids),
        )
    add_row(table, dim("free"), "", *(_free(free, node_id) for node_id in node_ids))
    return table


def _by_node(
    models: Sequence[downloads_service_pb2.ModelOnNodes],
    node_ids: Sequence[str],
    cells: Mapping[tuple[str, str], Text],
    free: Mapping[str, int],
    names: NodeNames,
) -> Table:
    table = new_table("NODE", ">FREE", "MODEL", ">SIZE", ">HAS")
    for node_id in node_ids:
        first: tuple[Cell, Cell] = (names.label(node_id), _free(free, node_id))
        held = [entry for entry in models if (entry.model_id, node_id) in cells]
        for entry in held:
            row = (entry.model_id, _size(entry), cells[entry.model_id, node_id])
            add_row(table, *first, *row)
            first = ("", "")
        if not held:
            add_row(table, *first, dim("-"), "", "")
    return table


def _matrix_width(
    node_ids: Sequence[str], cells: Mapping[tuple[str, str], Text], names: NodeNames
) -> int:
    width = _NAME_WIDTH + _GAP + len("999 MB")
    for node_id in node_ids:
        held = [cell.cell_len for (_, holder), cell in cells.items() if holder == node_id]
        width += _GAP + max([len(names.label(node_id)), len("999 GB"), *held])
    return width


def _size(entry: downloads_service_pb2.ModelOnNodes) -> Cell:
    total = model_size(entry)
    return size(total) if total else dim("?")


def _free(free: Mapping[str, int], node_id: str) -> Cell:
    return dim(size(free[node_id])) if free.get(node_id) else dim("-")


def _fraction(fraction: downloads_pb2.NodeFraction) -> Text:
    if fraction.state == downloads_pb2.DOWNLOAD_STATE_COMPLETED:
        return Text(percent(1.0), style="green")
    # Some of it lies there, but of how much in all is not known.
    text = Text(percent(fraction.fraction) if fraction.total_bytes else "?")
    if fraction.state not in downloads_pb2.DownloadState.values():
        return text.append(f" {download_state(fraction.state)}")
    if fraction.state in _STATES:
        word, style = _STATES[fraction.state]
        text.append(" ").append(word, style=style)
    return text
