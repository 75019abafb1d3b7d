"""What `shardring doctor` found."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from services.cli.doctor.findings import Finding
from services.cli.text import count


def findings_list(findings: Sequence[Finding], summary: str) -> RenderableType:
    """Return each finding with what to do below it, then the summary."""
    parts: list[RenderableType] = []
    for finding in findings:
        mark = Text("note  ", style="yellow") if finding.note else Text("wrong ", style="bold red")
        parts.append(mark + Text(finding.text))
        if finding.remedy:
            parts.append(Padding(Text(finding.remedy, style="dim"), (0, 0, 0, 6), expand=False))
    return Group(*parts, Text(summary, style="green" if healthy(findings) else ""))


def healthy(findings: Sequence[Finding]) -> bool:
    """Return whether nothing is wrong; notes do not count."""
    return all(finding.note for finding in findings)


def verdict(findings: Sequence[Finding], node_count: int, link_count: int) -> str:
    """Return the result in one sentence."""
    size = f"{count(node_count, 'node')}, {count(link_count, 'link')}"
    wrong = sum(not finding.note for finding in findings)
    if wrong:
        return f"{size}: {count(wrong, 'thing')} wrong."
    return f"{size}: nothing wrong with this cluster's network."
