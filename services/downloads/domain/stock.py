"""What nodes have and fetch of each commit, kept so that one file is quickly asked about."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from services.downloads.domain.records import CachedModel, Download

_NONE: frozenset[str] = frozenset()


@dataclass
class _Commit:
    """One commit of a model; "" for downloads whose commit is not known yet."""

    cached: dict[str, CachedModel] = field(default_factory=dict)
    # Live downloads by node, then by id.
    live: dict[str, dict[str, Download]] = field(default_factory=dict)
    # Nodes that have every file.
    complete: set[str] = field(default_factory=set)
    # Names of whole files by node, and nodes by name, of nodes that have some.
    whole: dict[str, frozenset[str]] = field(default_factory=dict)
    holders: dict[str, set[str]] = field(default_factory=dict)

    def look_again(self, node_id: str) -> None:
        """Note what files a node has whole, after something about it changed."""
        cached, live = self.cached.get(node_id), self.live.get(node_id, {})
        if cached is not None and cached.whole:
            self.complete.add(node_id)
        else:
            self.complete.discard(node_id)
        whole = _NONE if cached is None else cached.whole_files
        for download in live.values():
            whole |= download.whole_files
        before = self.whole.get(node_id, _NONE)
        if whole == before:
            return
        for name in before - whole:
            self.holders[name].discard(node_id)
            if not self.holders[name]:
                del self.holders[name]
        for name in whole - before:
            self.holders.setdefault(name, set()).add(node_id)
        if whole:
            self.whole[node_id] = whole
        else:
            del self.whole[node_id]


class Stock:
    """The models on nodes' disks, and the live downloads."""

    def __init__(self) -> None:
        self._commits: dict[tuple[str, str], _Commit] = {}
        self.live_count = 0

    def put_cached(self, node_id: str, model: CachedModel) -> None:
        """Note what a node's disk holds of a commit."""
        commit = self._commits.setdefault((model.model_id, model.commit), _Commit())
        commit.cached[node_id] = model
        commit.look_again(node_id)

    def drop_cached(self, node_id: str, model: CachedModel) -> None:
        """Note that this is no longer on a node's disk, as far as is known."""
        commit = self._commits[model.model_id, model.commit]
        del commit.cached[node_id]
        self._settle((model.model_id, model.commit), node_id)

    def put_live(self, download: Download) -> None:
        """Note a live download as it now is; one of the same id has to be dropped before."""
        key = (download.model_id, download.commit)
        commit = self._commits.setdefault(key, _Commit())
        commit.live.setdefault(download.node_id, {})[download.download_id] = download
        self.live_count += 1
        commit.look_again(download.node_id)

    def drop_live(self, download: Download) -> None:
        """Note that a download is no longer live, or no longer as it was put."""
        key = (download.model_id, download.commit)
        of_node = self._commits[key].live[download.node_id]
        del of_node[download.download_id]
        if not of_node:
            del self._commits[key].live[download.node_id]
        self.live_count -= 1
        self._settle(key, download.node_id)

    def replace_live(self, before: Download, download: Download) -> None:
        """Note how a live download now is."""
        if (before.node_id, before.model_id, before.commit) != (
            download.node_id,
            download.model_id,
            download.commit,
        ):
            self.drop_live(before)
            self.put_live(download)
            return
        commit = self._commits[download.model_id, download.commit]
        commit.live[download.node_id][download.download_id] = download
        if before.whole_files != download.whole_files:
            commit.look_again(download.node_id)

    def holders(self, model_id: str, commit: str, file_name: str) -> Collection[str]:
        """Return the nodes that have a file whole."""
        if (found := self._commits.get((model_id, commit))) is None:
            return _NONE
        return found.complete | found.holders.get(file_name, _NONE)

    def live(self, node_id: str, model_id: str, commit: str) -> list[Download]:
        """Return a node's live downloads of a commit, and those that may turn out to be of it."""
        return [
            download
            for key in ((model_id, commit), (model_id, ""))
            if key in self._commits
            for download in self._commits[key].live.get(node_id, {}).values()
        ]

    def fetching(self, model_id: str, commit: str) -> Iterator[Download]:
        """Yield all live downloads of a commit."""
        if (found := self._commits.get((model_id, commit))) is not None:
            for of_node in found.live.values():
                yield from of_node.values()

    def _settle(self, key: tuple[str, str], node_id: str) -> None:
        commit = self._commits[key]
        commit.look_again(node_id)
        if not commit.cached and not commit.live:
            del self._commits[key]
