"""A trace as a tree: which process called which, and how long each step took."""

from collections.abc import Sequence

from rich.text import Text
from rich.tree import Tree

from services.cli.spans import Span, children_of
from services.cli.text import duration

_SERVER, _CLIENT = 2, 3
_COLOURS = {"demo": "white", "cli": "white", "placement": "magenta", "topology": "cyan"}


def trace_tree(spans: Sequence[Span]) -> Tree:
    """Return the spans as one tree, with the process of each.

    A call's client and server span are shown as one line, the server's: the caller is the line
    above.
    """
    children = children_of(spans)

    def add(branch: Tree, span: Span) -> None:
        below = children.get(span.span_id, [])
        if span.kind == _CLIENT and len(below) == 1 and below[0].kind == _SERVER:
            add(branch, below[0])
            return
        twig = branch.add(_label(span))
        for child in below:
            add(twig, child)

    root = Tree("", hide_root=True)
    for span in children.get("", []):
        add(root, span)
    return root


def _label(span: Span) -> Text:
    colour = _COLOURS.get(span.process, "green" if span.process.startswith("rank") else "blue")
    label = Text.assemble((span.process, colour), "  ", _name(span), "  ")
    label.append(duration(span.milliseconds / 1000), "dim")
    if span.error:
        label.append("  error", "red")
    return label


def _name(span: Span) -> str:
    """Return "Place" for "/shardring.placement.v1.PlacementService/Place"."""
    return span.name.rpartition("/")[2]
