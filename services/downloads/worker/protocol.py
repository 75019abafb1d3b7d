"""What a worker and its fetching child tell each other: one JSON object on a line each."""

import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from services.common.errors import Reason, ShardringError


class Fault(StrEnum):
    """Why a file did not come, by whose fault."""

    # The source named or sent what cannot be true; what came from it is thrown away.
    LIED = "lied"
    # The source was not reached, was silent or too slow, broke off, or had a fault of its own; what
    # came from it stays.
    STALLED = "stalled"
    # The source will not give it: no access, no such file.
    REFUSED = "refused"
    # Parts that came at different times are not the file; nobody can say which is wrong.
    MIXED = "mixed"
    # This node cannot write it.
    LOCAL = "local"


@dataclass(frozen=True)
class FetchJob:
    """The child's first line: what all files to come have in common.

    `token` None: the one huggingface_hub knows. `xet` False: never by way of Xet storage. `tls`:
    the files of certificate, key and CA by which neighbours are met; empty: in the clear.
    """

    model_id: str
    commit: str
    endpoint: str
    token: str | None
    cache_dir: str
    storage: str
    parallel_files: int
    xet: bool = True
    tls: tuple[str, ...] = ()


@dataclass(frozen=True)
class FileOrder:
    """Fetch this file. `etag` names its content as the hub lists it, "" when the list is not known.

    `node_id` and `endpoint` name the neighbour to take it from; empty: from the hub.
    """

    name: str
    size_bytes: int
    etag: str
    node_id: str = ""
    endpoint: str = ""


@dataclass(frozen=True)
class Outcome:
    """How the fetching of one file went. `fault` None: it is whole.

    `received_bytes` came from the source, used or not; `kept_bytes` are on disk now, for the next
    try to go on from. `wait_seconds`: after which the source wants to be asked again. `reason`,
    `message` and `metadata` are of a ShardringError.
    """

    name: str
    node_id: str = ""
    received_bytes: int = 0
    kept_bytes: int = 0
    fault: Fault | None = None
    wait_seconds: float | None = None
    reason: str = ""
    message: str = ""
    metadata: dict[str, str] | None = None

    @property
    def error(self) -> ShardringError:
        """The error behind `fault`."""
        return ShardringError(Reason[self.reason], self.message, metadata={**(self.metadata or {})})


def job_line(job: FetchJob) -> str:
    """Return the first line to a child."""
    return json.dumps(asdict(job))


def job_from_line(line: str) -> FetchJob:
    """Return what `job_line` said."""
    fields: dict[str, Any] = json.loads(line)
    return FetchJob(**{**fields, "tls": tuple(fields.get("tls", ()))})


def order_line(order: FileOrder) -> str:
    """Return the line that has a file fetched."""
    return json.dumps({"fetch": asdict(order)})


def limit_line(bytes_per_second: float) -> str:
    """Return the line that bounds what the child receives in all; 0 removes the bound."""
    return json.dumps({"limit": bytes_per_second})


def command_from_line(line: str) -> FileOrder | float:
    """Return what `order_line` or `limit_line` said."""
    command: dict[str, Any] = json.loads(line)
    if "fetch" in command:
        return FileOrder(**command["fetch"])
    return float(command["limit"])


def outcome_line(outcome: Outcome) -> str:
    """Return the child's answer about one file."""
    return json.dumps(asdict(outcome))


def outcome_from_line(line: bytes) -> Outcome:
    """Return what `outcome_line` said."""
    fields: dict[str, Any] = json.loads(line)
    fault = fields.pop("fault")
    return Outcome(**fields, fault=None if fault is None else Fault(fault))
