"""How far a download is: bytes on disk, speeds, time left, and who they came from."""

import collections
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.downloads.domain.records import FileProgress
from services.downloads.worker.protocol import Outcome

# Speed is measured over this time.
_SPEED_SECONDS = 5.0
_LONGEST_SECONDS = 100 * 24 * 3600


class Speed:
    """Recent bytes per second of a growing amount."""

    def __init__(self) -> None:
        self._seen: collections.deque[tuple[float, int]] = collections.deque()

    def add(self, now: float, amount: int) -> int:
        """Note the amount; return its recent growth per second, 0 when it shrank."""
        self._seen.append((now, amount))
        while now - self._seen[0][0] > _SPEED_SECONDS:
            self._seen.popleft()
        elapsed = now - self._seen[0][0]
        return max(0, round((amount - self._seen[0][1]) / elapsed)) if elapsed else 0


@dataclass
class _UnderWay:
    node_id: str
    bytes_before: int
    speed: Speed = field(default_factory=Speed)


class Meter:
    """Follows one download's files. Only those under way are looked for on disk.

    `etags` names each file's content; `before` is what was on disk before anything was fetched.
    """

    def __init__(self, etags: Mapping[str, str], before: Sequence[FileProgress]) -> None:
        self._etags = etags
        self._files = {file.name: file for file in before}
        self._under_way: dict[str, _UnderWay] = {}
        self._speed = Speed()
        self._from_hub = self._from_nodes = 0

    @property
    def etags(self) -> set[str]:
        """What is being written now."""
        return {self._etags[name] for name in self._under_way if name in self._etags}

    @property
    def left_bytes(self) -> int:
        """Bytes still to be written, as of the last look."""
        return sum(file.total_bytes - file.downloaded_bytes for file in self._files.values())

    def begin(self, name: str, node_id: str) -> None:
        """Note that a file is under way, from a node or ("") the hub."""
        self._under_way[name] = _UnderWay(node_id, self._files[name].downloaded_bytes)

    def end(self, outcome: Outcome) -> None:
        """Note how a file went."""
        del self._under_way[outcome.name]
        file = self._files[outcome.name]
        done = file.total_bytes if outcome.fault is None else outcome.kept_bytes
        self._files[outcome.name] = FileProgress(
            file.name, min(done, file.total_bytes), file.total_bytes
        )
        self._received(outcome.node_id, outcome.received_bytes)

    def look(self, now: float, on_disk: Mapping[str, int]) -> dict[str, Any]:
        """Return the fields of Download that change, from the sizes of what is being written."""
        for name, going in self._under_way.items():
            file = self._files[name]
            # A whole blob still has to be linked into the snapshot, so a byte short of done.
            done = max(0, min(file.total_bytes - 1, on_disk.get(self._etags.get(name, ""), 0)))
            speed = going.speed.add(now, done)
            self._files[name] = FileProgress(
                name,
                done,
                file.total_bytes,
                speed,
                going.node_id,
                _time_left(file.total_bytes - done, speed),
            )
        speed = self._speed.add(now, sum(file.downloaded_bytes for file in self._files.values()))
        from_hub, from_nodes = self._from_hub, self._from_nodes
        for name, going in self._under_way.items():
            grown = max(0, self._files[name].downloaded_bytes - going.bytes_before)
            if going.node_id:
                from_nodes += grown
            else:
                from_hub += grown
        return amounts(tuple(self._files.values())) | {
            "bytes_per_second": speed,
            "time_left_seconds": _time_left(self.left_bytes, speed),
            "received_from_hub_bytes": from_hub,
            "received_from_nodes_bytes": from_nodes,
        }

    def finish(self, files: Sequence[FileProgress]) -> dict[str, Any]:
        """Return the same fields from a last look at all files, when nothing is written any more.

        What was cut off never said what it received: what is on disk of it counts.
        """
        for file in files:
            if going := self._under_way.pop(file.name, None):
                self._received(going.node_id, max(0, file.downloaded_bytes - going.bytes_before))
        return amounts(tuple(files)) | {
            "bytes_per_second": 0,
            "time_left_seconds": None,
            "received_from_hub_bytes": self._from_hub,
            "received_from_nodes_bytes": self._from_nodes,
        }

    def _received(self, node_id: str, count: int) -> None:
        if node_id:
            self._from_nodes += count
        else:
            self._from_hub += count


def _time_left(left_bytes: int, bytes_per_second: int) -> float | None:
    """Return the seconds it takes, None when that is as good as for ever."""
    if left_bytes > bytes_per_second * _LONGEST_SECONDS:
        return None
    return left_bytes / bytes_per_second if bytes_per_second else 0.0


def amounts(files: tuple[FileProgress, ...]) -> dict[str, Any]:
    """Return the fields of Download that say how much is on disk."""
    return {
        "files": files,
        "downloaded_bytes": sum(file.downloaded_bytes for file in files),
        "total_bytes": sum(file.total_bytes for file in files),
    }
