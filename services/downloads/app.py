"""The downloads service's use cases, free of gRPC."""

import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Sequence
from contextlib import aclosing

from services.common.errors import Reason, ShardringError
from services.common.paging import newest_first, page
from services.downloads.domain.assignment import Ask, Assigned, Claims, check_ask
from services.downloads.domain.fractions import node_fraction, pick_cached, pick_facts
from services.downloads.domain.names import (
    check_ids,
    check_instance_id,
    check_layers,
    check_model_id,
    check_revision,
)
from services.downloads.domain.records import (
    CachedModel,
    Download,
    Layers,
    ModelFacts,
    ModelOnNodes,
    NodeDisk,
    NodeFraction,
    Verification,
)
from services.downloads.fleet import AttachedNode, Fleet
from services.downloads.watchers import Watchers

# A model that three nodes cannot read, no fourth will.
READ_ATTEMPTS = 3
MAX_COMMITS = 1000
# What a model itself is like: no other node reads it differently.
_FINAL = frozenset({Reason.MODEL_WITHOUT_WEIGHTS, Reason.MODEL_MALFORMED, Reason.INVALID_FIELD})


class Downloads:
    """What callers may ask. Errors stand with each call in downloads_service.proto."""

    def __init__(self, fleet: Fleet, watchers: Watchers) -> None:
        self._fleet = fleet
        self._watchers = watchers
        self._claims = Claims()
        # What a branch or tag last meant, for nodes that fetched by commit and know no branches.
        self._commits: dict[tuple[str, str], str] = {}

    async def start(
        self,
        node_id: str,
        model_id: str,
        revision: str,
        layers: Layers | None,
        instance_id: str = "",
    ) -> Download:
        """Have a node fetch a model or some layers, for an instance or (no id) for whoever asks;
        the worker decides whether to join one."""
        check_model_id(model_id)
        check_instance_id(instance_id)
        revision, layers = check_revision(revision), check_layers(layers)
        worker = self._fleet.worker(node_id)
        download_id = f"d-{secrets.token_hex(6)}"
        download = await worker.start_download(download_id, model_id, revision, layers, instance_id)
        if not instance_id:
            self._fleet.wanted.add(download.download_id)
        return self._fleet.downloads.get(download.download_id, download)

    async def go_on(self, node_id: str) -> None:
        """Begin again what a node that attached left unfinished and a person wants."""
        if (node := self._fleet.nodes.get(node_id)) is None:
            return
        while node.interrupted:
            lost = node.interrupted.pop(0)
            asked = (lost.download_id, lost.model_id, lost.revision, lost.layers, "")
            try:
                begun = await node.worker.start_download(*asked)
            except ShardringError as error:
                self._fleet.fail(lost, error)
                continue
            if begun.download_id != lost.download_id:
                why = f"Its node already fetches the same as {begun.download_id}: follow that."
                self._fleet.fail(lost, ShardringError(Reason.DOWNLOAD_FAILED, why))

    def get(self, download_id: str) -> Download:
        """Return one download."""
        if (download := self._fleet.downloads.get(download_id)) is None:
            raise ShardringError(
                Reason.DOWNLOAD_NOT_FOUND,
                f"No download is called {download_id[:80]!r}. It may be older than this service.",
                metadata={"download_id": download_id[:80]},
            )
        return download

    def list_downloads(
        self, node_id: str, model_id: str, page_size: int, page_token: str
    ) -> tuple[Sequence[Download], str]:
        """Return a page of downloads, newest first, and the token of the next one."""
        found = self._fleet.of(node_id=node_id, model_id=model_id)
        return page(found, page_size, page_token, key=_newest_first)

    def fractions(
        self, model_id: str, node_ids: Sequence[str], revision: str
    ) -> Sequence[NodeFraction]:
        """Return how much of a model each asked node has, in node id order."""
        check_model_id(model_id)
        check_ids("node_ids", node_ids)
        revision = check_revision(revision)
        # One commit for all nodes, the one that `model` would return facts of.
        facts = self._reported(model_id, revision)
        commit = facts.commit if facts else self._commits.get((model_id, revision), revision)
        return [
            self._fraction(model_id, node_id, commit)
            for node_id in sorted(set(node_ids) or set(self._fleet.nodes))
        ]

    async def watch(
        self, download_ids: Collection[str]
    ) -> AsyncIterator[tuple[Sequence[Download], int]]:
        """Yield matching downloads and a revision: all at first, then those that changed."""
        check_ids("download_ids", download_ids)
        wanted = set(download_ids)
        # Collects before the first message is made, so that no change falls between.
        with self._watchers.watch() as watch:
            first = [d for i, d in self._fleet.downloads.items() if not wanted or i in wanted]
            yield sorted(first, key=_newest_first), self._watchers.revision
            while True:
                changed = await watch.changed()
                ids = changed & wanted if wanted else changed
                found = [d for i in ids if (d := self._fleet.downloads.get(i)) is not None]
                if found:
                    yield sorted(found, key=_newest_first), self._watchers.revision

    async def cancel(self, download_id: str, instance_id: str = "") -> Download:
        """Stop a download and keep what it fetched; with an instance only withdraw its wish."""
        check_instance_id(instance_id)
        download = self.get(download_id)
        if not instance_id:
            self._fleet.wanted.discard(download_id)
        if not download.live:
            return download
        return await self._fleet.worker(download.node_id).cancel_download(download_id, instance_id)

    async def delete_model(self, node_id: str, model_id: str) -> int:
        """Remove a model from a node's disk; return the bytes freed."""
        check_model_id(model_id)
        freed = await self._fleet.worker(node_id).delete_model(model_id)
        self._fleet.drop_cached(node_id, model_id)
        return freed

    async def verify_model(self, node_id: str, model_id: str) -> AsyncGenerator[Verification, None]:
        """Compare a model's files on a node's disk with their hashes; yield how far that is."""
        check_model_id(model_id)
        async with aclosing(self._fleet.worker(node_id).verify_model(model_id)) as steps:
            async for step in steps:
                yield step

    async def model(self, model_id: str, revision: str) -> ModelFacts:
        """Return a model's facts: as reported by a node that has it, else read by one."""
        check_model_id(model_id)
        revision = check_revision(revision)
        facts = self._reported(model_id, revision) or await self._read(model_id, revision)
        while len(self._commits) >= MAX_COMMITS:
            del self._commits[next(iter(self._commits))]
        self._commits[model_id, revision] = facts.commit
        return facts

    def _reported(self, model_id: str, revision: str) -> ModelFacts | None:
        """Return the facts of a revision that some node has on its disk."""
        meant = (
            pick_cached(_of_model(node, model_id), revision) for node in self._fleet.nodes.values()
        )
        return pick_facts([model for model in meant if model is not None])

    def models(self, page_size: int, page_token: str) -> tuple[Sequence[ModelOnNodes], str]:
        """Return a page of the models on attached nodes' disks, ordered by id."""
        ids = {
            model.model_id
            for node in self._fleet.nodes.values()
            for model in node.cached.values()
            if model.downloaded_bytes
        }
        shown, token = page(ids, page_size, page_token, key=str)
        return [self._on_nodes(model_id) for model_id in shown], token

    def disks(self) -> Sequence[NodeDisk]:
        """Return the room on every attached node's disk, in node id order."""
        return self._fleet.disks()

    def assign(self, ask: Ask) -> Assigned:
        """Tell a node's worker where to take files from."""
        check_ask(ask)
        self._fleet.worker(ask.node_id)
        fleet = self._fleet
        return self._claims.assign(ask, fleet.hub_ports, fleet.stock, time.monotonic())

    def _on_nodes(self, model_id: str) -> ModelOnNodes:
        fractions, cached = [], []
        for node_id, node in sorted(self._fleet.nodes.items()):
            if (best := _best(node, model_id)) is not None and best.downloaded_bytes:
                downloads = self._fleet.of(node_id=node_id, model_id=model_id)
                fractions.append(node_fraction(node_id, best, downloads))
                cached.append(best)
        return ModelOnNodes(model_id, tuple(fractions), pick_facts(cached))

    def _fraction(self, model_id: str, node_id: str, commit: str) -> NodeFraction:
        node = self._fleet.nodes.get(node_id)
        if node is None:
            return NodeFraction(node_id, 0.0, None, 0, 0)
        cached = pick_cached(_of_model(node, model_id), commit)
        downloads = [
            download
            for download in self._fleet.of(node_id=node_id, model_id=model_id)
            if commit in (download.revision, download.commit)
            or (cached is not None and cached.commit == download.commit)
        ]
        return node_fraction(node_id, cached, downloads)

    async def _read(self, model_id: str, revision: str) -> ModelFacts:
        """Ask workers in turn, those with some of the model first; raise the first error."""
        nodes = sorted(
            self._fleet.nodes.items(),
            key=lambda entry: (_best(entry[1], model_id) is None, entry[0]),
        )
        first: ShardringError | None = None
        for _, node in nodes[:READ_ATTEMPTS]:
            try:
                return await node.worker.read_model(model_id, revision)
            except ShardringError as error:
                first = first or error
                if error.reason in _FINAL:
                    break
        raise first or ShardringError(
            Reason.NO_WORKERS,
            "No node's downloads worker is attached, so nobody can read the model. Start a node.",
            retry_delay_seconds=1,
        )


def _of_model(node: AttachedNode, model_id: str) -> list[CachedModel]:
    return [model for key, model in node.cached.items() if key[0] == model_id]


def _best(node: AttachedNode, model_id: str) -> CachedModel | None:
    """Return a node's main commit of a model, else its fullest."""
    models = _of_model(node, model_id)
    return pick_cached(models, "main") or pick_cached(models, None)


def _newest_first(download: Download) -> str:
    return newest_first(download.create_time, download.download_id)
