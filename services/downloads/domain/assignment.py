"""Where a node takes files from: other nodes that have them, or the hub, one node for each file.

Decisions from plain data; the clock is the caller's, in seconds.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from services.common.errors import invalid_field
from services.downloads.domain.names import (
    MAX_ID_LENGTH,
    check_file_names,
    check_ids,
    check_model_id,
    is_commit,
)
from services.downloads.domain.stock import Stock

# A node that gains nothing of a file for so long leaves it to another.
STALLED_SECONDS = 15.0
MAX_COUNT = 64
# The report of a download may come later than what its worker asks.
SETTLE_SECONDS = 5.0
# When to ask again: soon, but for all downloads together not more often than this.
MIN_RETRY_SECONDS = 0.3
MAX_RETRY_SECONDS = 8.0
ASKS_PER_SECOND = 100.0
# A claim that nobody asked about for so long is forgotten; the node's own reports still tell.
_FORGET_SECONDS = 60.0


@dataclass(frozen=True)
class Ask:
    """What a worker asks; see shardring.downloads.v1.AssignSourcesRequest for each field."""

    node_id: str
    model_id: str
    commit: str
    file_names: tuple[str, ...]
    max_count: int
    excluded: frozenset[str] = frozenset()
    released: frozenset[str] = frozenset()


def check_ask(ask: Ask) -> None:
    """Refuse, with INVALID_FIELD, what a worker cannot mean."""
    if not 1 <= len(ask.node_id) <= MAX_ID_LENGTH:
        raise invalid_field("node_id", ask.node_id, "a node's id")
    check_model_id(ask.model_id)
    if not is_commit(ask.commit):
        raise invalid_field("commit", ask.commit, "40 hexadecimal digits")
    check_file_names("file_names", ask.file_names)
    check_file_names("released_file_names", ask.released)
    check_ids("excluded_node_ids", ask.excluded)
    # Who only releases files begins none.
    if not (1 if ask.file_names else 0) <= ask.max_count <= MAX_COUNT:
        raise invalid_field("max_count", ask.max_count, f"1 to {MAX_COUNT}")


@dataclass(frozen=True)
class Source:
    """Where to take one file from: (node id, port) of the nodes that have it; none: the hub."""

    file_name: str
    nodes: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Assigned:
    """The answer. `retry_seconds` is None when all is assigned, or as much as was asked for."""

    sources: tuple[Source, ...]
    retry_seconds: float | None


@dataclass(slots=True)
class _Claim:
    """A file that a node was told to fetch from the hub, and how far it was when it last gained."""

    node_id: str
    granted_at: float
    downloaded_bytes: int
    gained_at: float
    asked_at: float


class Claims:
    """Which node fetches which file from the hub."""

    def __init__(self) -> None:
        # By model and commit, then by file.
        self._held: dict[tuple[str, str], dict[str, _Claim]] = {}
        self._swept_at = 0.0

    def assign(self, ask: Ask, ports: Mapping[str, int], stock: Stock, now: float) -> Assigned:
        """Decide for each file that the node asks for, in that order.

        `ports` are those where attached nodes serve their files, 0 where one does not.
        """
        self._sweep(now)
        held = self._held.setdefault((ask.model_id, ask.commit), {})
        for name in ask.released:
            if name in held and held[name].node_id == ask.node_id:
                del held[name]
        view = _View(ask, ports, stock)
        sources: list[Source] = []
        waiting = False
        for name in dict.fromkeys(ask.file_names):
            if len(sources) == ask.max_count:
                return Assigned(tuple(sources), None)
            if nodes := view.holders(name):
                held.pop(name, None)
                sources.append(Source(name, nodes))
            elif (claim := view.others_claim(held.get(name), name, now)) is not None:
                held[name] = claim
                waiting = True
            else:
                done = view.downloaded_bytes(ask.node_id, name)
                held[name] = _Claim(ask.node_id, now, done, now, now)
                sources.append(Source(name))
        return Assigned(tuple(sources), retry_seconds(stock.live_count) if waiting else None)

    def _sweep(self, now: float) -> None:
        if now - self._swept_at < _FORGET_SECONDS:
            return
        self._swept_at = now
        for key, held in list(self._held.items()):
            for name, claim in list(held.items()):
                if now - claim.asked_at >= _FORGET_SECONDS:
                    del held[name]
            if not held:
                del self._held[key]


class _View:
    """The cluster as the asking node can use it."""

    def __init__(self, ask: Ask, ports: Mapping[str, int], stock: Stock) -> None:
        self._ask = ask
        self._ports = ports
        self._stock = stock

    def holders(self, name: str) -> tuple[tuple[str, int], ...]:
        """Return where a file can be had, in node id order."""
        found = self._stock.holders(self._ask.model_id, self._ask.commit, name)
        return tuple((node, self._ports[node]) for node in sorted(found) if self._usable(node))

    def downloaded_bytes(self, node_id: str, name: str) -> int:
        """Return how much of a file a node's live downloads have."""
        live = self._stock.live(node_id, self._ask.model_id, self._ask.commit)
        return max((d.by_name[name].downloaded_bytes for d in live if name in d.by_name), default=0)

    def others_claim(self, claim: _Claim | None, name: str, now: float) -> _Claim | None:
        """Return the claim that the node has to wait for, as it now stands; None: none."""
        if claim is None:
            return self._fetched_unasked(name, now)
        if not self._usable(claim.node_id):
            return None
        claim.asked_at = now
        if not self._stock.live(claim.node_id, self._ask.model_id, self._ask.commit):
            return claim if now - claim.granted_at < SETTLE_SECONDS else None
        done = self.downloaded_bytes(claim.node_id, name)
        if done != claim.downloaded_bytes:
            claim.downloaded_bytes, claim.gained_at = done, now
        return claim if now - claim.gained_at < STALLED_SECONDS else None

    def _fetched_unasked(self, name: str, now: float) -> _Claim | None:
        """Return a claim for a node that says the hub is sending it a file: claims are forgotten
        when the service restarts, but the nodes go on."""
        for download in self._stock.fetching(self._ask.model_id, self._ask.commit):
            file = download.by_name.get(name)
            if (
                file is not None
                and file.bytes_per_second > 0
                and not file.whole
                and not file.source_node_id
                and self._usable(download.node_id)
            ):
                return _Claim(download.node_id, now, file.downloaded_bytes, now, now)
        return None

    def _usable(self, node_id: str) -> bool:
        return (
            self._ports.get(node_id, 0) != 0
            and node_id != self._ask.node_id
            and node_id not in self._ask.excluded
        )


def retry_seconds(live_count: int) -> float:
    """Return when to ask again for a download, as one of so many live ones."""
    return min(MAX_RETRY_SECONDS, max(MIN_RETRY_SECONDS, live_count / ASKS_PER_SECOND))
