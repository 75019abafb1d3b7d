"""Write docs/errors.md from error_reason.proto's comments and the table of gRPC codes.

Run after either changed: `.venv/bin/python scripts/errors-doc.py`.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import grpc

from services.common.errors import Reason
from services.common.status import CODES

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "protos" / "shardring" / "common" / "v1" / "error_reason.proto"
OUTPUT = ROOT / "docs" / "errors.md"

# Reasons are numbered by the service that they come from.
GROUPS = {
    0: "Any service",
    1: "Topology",
    2: "Models and downloads",
    3: "Placement",
    4: "Instances and requests",
}

_VALUE = re.compile(r"((?:^  //.*\n)+)  ERROR_REASON_(\w+) = (\d+);", re.MULTILINE)
_CODES = "|".join(code.name for code in grpc.StatusCode)
_CODE = re.compile(rf" *\b({_CODES})( with RetryInfo)?\.(?= |$)")

INTRODUCTION = """\
# Errors

Every refusal of every Shardring service is a gRPC status with a `google.rpc.ErrorInfo` in its
details. Its domain is `shardring`, its reason one of those below, and its metadata holds figures
for programs: strings, counts and bytes in decimal. The status message is for people. Where a
later try can help, a `google.rpc.RetryInfo` says when.

With `--json` the `shardring` command prints reason, message and metadata on standard error, and
exits with 1:

```json
{"error": {"reason": "INVALID_FIELD", "message": "...", "metadata": {"field": "..."}}}
```

This page is generated from `protos/shardring/common/v1/error_reason.proto`, where each reason also
has an example of its metadata.
"""


@dataclass(frozen=True)
class Documented:
    """One reason as its comment tells it; `meaning` without the gRPC code."""

    reason: Reason
    number: int
    meaning: str
    remedy: str
    metadata_keys: tuple[str, ...]


def documented(proto: str) -> list[Documented]:
    """Return the reasons in the proto's order.

    Raises ValueError where a comment lacks a part, or names another code than the table.
    """
    found = []
    for comment, name, number in _VALUE.findall(proto):
        if name == "UNSPECIFIED":
            continue
        text = " ".join(line.strip().removeprefix("//").strip() for line in comment.splitlines())
        meaning, do, rest = text.partition(" Do: ")
        remedy, marker, example = rest.partition(" Example: ")
        reason = Reason(name)
        codes = [code for code, _ in _CODE.findall(meaning)]
        if not do or not marker or codes != [CODES[reason].name]:
            raise ValueError(
                f"{name}: expected a meaning with the code {CODES[reason].name}, "
                f'then "Do: ..." and "Example: {{...}}"; found: {text}'
            )
        meaning = _CODE.sub("", meaning, count=1).strip()
        found.append(Documented(reason, int(number), meaning, remedy, tuple(json.loads(example))))
    return found


def page(proto: str) -> str:
    """Return docs/errors.md for the text of error_reason.proto."""
    lines = [INTRODUCTION]
    reasons = documented(proto)
    for group, title in GROUPS.items():
        lines += [
            f"## {title}",
            "",
            "| reason | gRPC code | meaning | what to do | metadata |",
            "| --- | --- | --- | --- | --- |",
        ]
        lines += [_row(one) for one in reasons if one.number // 100 == group]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _row(one: Documented) -> str:
    keys = ", ".join(f"`{key}`" for key in one.metadata_keys)
    cells = (f"`{one.reason}`", CODES[one.reason].name, one.meaning, one.remedy, keys)
    return "|" + "".join(f" {cell} |" if cell else " |" for cell in cells)


if __name__ == "__main__":
    OUTPUT.write_text(page(SOURCE.read_text()))
