"""The records the service, its workers and the wire agree on."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import cached_property

from services.common.errors import ShardringError


class DownloadState(Enum):
    """Where a download is in its life; see shardring.downloads.v1.DownloadState."""

    PENDING = auto()
    ONGOING = auto()
    COMPLETED = auto()
    FAILED = auto()
    CANCELLED = auto()


LIVE_STATES = frozenset({DownloadState.PENDING, DownloadState.ONGOING})


@dataclass(frozen=True)
class Layers:
    """A stage: transformer layers [start, end)."""

    start: int
    end: int


@dataclass(frozen=True)
class FileProgress:
    """Bytes of one needed file that are on disk, of its bytes in all."""

    name: str
    downloaded_bytes: int
    total_bytes: int
    bytes_per_second: int = 0
    # The node it is being fetched from; "": none, or the hub.
    source_node_id: str = ""
    # Until it is whole at the recent speed; None while that is not known.
    time_left_seconds: float | None = None

    @property
    def whole(self) -> bool:
        """True when all of it is on disk; not known, so false, of a file without a byte."""
        return 0 < self.total_bytes == self.downloaded_bytes


@dataclass(frozen=True)
class Download:
    """Fetching a model, or some layers of it, to one node. Times are seconds since 1970."""

    download_id: str
    node_id: str
    model_id: str
    revision: str
    layers: Layers | None
    state: DownloadState
    create_time: float
    update_time: float
    commit: str = ""
    downloaded_bytes: int = 0
    total_bytes: int = 0
    bytes_per_second: int = 0
    files: tuple[FileProgress, ...] = ()
    error: ShardringError | None = None
    snapshot_path: str = ""
    time_left_seconds: float | None = None
    received_from_hub_bytes: int = 0
    received_from_nodes_bytes: int = 0

    @cached_property
    def by_name(self) -> Mapping[str, FileProgress]:
        """Its files by their names."""
        return {file.name: file for file in self.files}

    @cached_property
    def whole_files(self) -> frozenset[str]:
        """Names of the needed files that are whole on disk."""
        return frozenset(file.name for file in self.files if file.whole)

    @property
    def live(self) -> bool:
        """True while it may still change by itself."""
        return self.state in LIVE_STATES

    def at_rest(self) -> "Download":
        """Return it as it is while nothing comes."""
        return replace(
            self,
            bytes_per_second=0,
            time_left_seconds=None,
            files=tuple(
                FileProgress(file.name, file.downloaded_bytes, file.total_bytes)
                for file in self.files
            ),
        )


@dataclass(frozen=True)
class ModelFile:
    """One needed file of a model, and which stages need it."""

    name: str
    size_bytes: int
    every_stage: bool = False
    first_stage: bool = False
    last_stage: bool = False
    layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Cuts:
    """The layers, ascending, that a stage may begin at; and what stands against the others."""

    layers: tuple[int, ...]
    obstacle: str = ""


@dataclass(frozen=True)
class ModelFacts:
    """What a model's own files say; see shardring.downloads.v1.Model for each field."""

    model_id: str
    commit: str
    model_type: str
    engine_supported: bool
    layer_bytes: tuple[int, ...]
    embedding_bytes: int
    head_bytes: int
    weight_bytes: int
    hidden_size: int
    attention_head_count: int
    key_value_head_count: int
    context_token_count: int
    has_chat_template: bool
    quantization: str
    license: str
    hidden_bytes_per_value: int
    files: tuple[ModelFile, ...]
    key_value_bytes_per_token: int = 0
    tensor_supported: bool = False
    gated: bool = False
    # None: not known yet.
    cuts: Cuts | None = None

    @property
    def total_bytes(self) -> int:
        """Bytes of all needed files."""
        return sum(file.size_bytes for file in self.files)


@dataclass(frozen=True)
class CachedModel:
    """A model at one commit in a node's cache folder.

    `total_bytes` is 0 while unknown; `facts` None means "not known, or as reported before".
    `whole_files` names the needed files that are whole, while not all are.
    """

    model_id: str
    commit: str
    revisions: tuple[str, ...]
    downloaded_bytes: int
    total_bytes: int
    facts: ModelFacts | None = None
    whole_files: frozenset[str] = frozenset()

    @property
    def whole(self) -> bool:
        """True when every needed file is on disk with its full size."""
        return 0 < self.total_bytes <= self.downloaded_bytes

    def resolves(self, revision: str) -> bool:
        """True when `revision` (branch, tag or commit) means this commit here."""
        return revision == self.commit or revision in self.revisions


@dataclass(frozen=True)
class NodeFraction:
    """How much of a model one node has. `state` None: it has nothing of it."""

    node_id: str
    fraction: float
    state: DownloadState | None
    downloaded_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class NodeDisk:
    """Room on the file system of a node's cache folder."""

    node_id: str
    available_bytes: int


@dataclass(frozen=True)
class Verification:
    """How far the verification of a model is; see shardring.downloads.v1.Verification."""

    verified_bytes: int
    total_bytes: int
    corrupt_files: tuple[str, ...] = ()
    unverifiable_files: tuple[str, ...] = ()
    done: bool = False


@dataclass(frozen=True)
class ModelOnNodes:
    """A model, where it is, and what is known about it."""

    model_id: str
    fractions: tuple[NodeFraction, ...]
    facts: ModelFacts | None
