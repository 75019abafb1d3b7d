"""A node's cache folder, shown to other nodes read-only and in the hub's own protocol.

Shown are whole model files of commits whose file list is kept: those of the listed size that
snapshots/COMMIT/FILE leads to under their ETag in the same model's blobs folder. Nothing else in
the folder is: no partial files, and no links to elsewhere.
"""

import logging
import re
import stat
from functools import lru_cache
from pathlib import Path

from services.common.addresses import HostPort
from services.common.errors import ShardringError
from services.common.server import ListenError
from services.downloads.domain.names import check_model_id, is_commit, is_safe_file
from services.downloads.hub import HubServer
from services.downloads.hub_protocol import HubFile, HubModel, NotShown, hub_routes
from services.downloads.worker.cache import Cache, ListedFile, Listing

logger = logging.getLogger(__name__)

# Bodies sent at a time. More would only be slower each; who asks then is told to ask again.
MAX_BODIES = 16
MAX_PORT = 65535
_KEPT_LISTINGS = 16
# SHA-256 of the content, or the SHA-1 that git gives it.
_ETAG = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


class CachedFiles:
    """Implements `services.downloads.hub_protocol.Shown` over a cache folder."""

    def __init__(self, folder: Path) -> None:
        self._cache = Cache(folder)
        self._listing = lru_cache(_KEPT_LISTINGS)(self._read_listing)

    def model(self, model_id: str, revision: str) -> HubModel:
        """See Shown."""
        commit, listing = self._find(model_id, revision)
        files = {}
        for name, listed in listing.items():
            if (file := self._whole(model_id, commit, name, listed)) is not None:
                files[name] = file
        return HubModel(model_id, commit, files)

    def file(self, model_id: str, revision: str, name: str) -> tuple[str, HubFile]:
        """See Shown."""
        commit, listing = self._find(model_id, revision)
        listed = listing.get(name)
        file = None if listed is None else self._whole(model_id, commit, name, listed)
        if file is None:
            raise NotShown("EntryNotFound", "Entry not found", commit=commit)
        return commit, file

    def _find(self, model_id: str, revision: str) -> tuple[str, Listing]:
        try:
            check_model_id(model_id)
        except ShardringError as error:
            raise NotShown("RepoNotFound", "Repository not found") from error
        storage = self._cache.storage(model_id)
        if storage.resolve() != self._cache.folder.resolve() / storage.name or not storage.is_dir():
            raise NotShown("RepoNotFound", "Repository not found")
        commit = revision if is_commit(revision) else self._cache.refs(model_id).get(revision)
        listing = None if commit is None else self._kept_listing(model_id, commit)
        if commit is None or listing is None:
            raise NotShown("RevisionNotFound", f"Invalid rev id: {revision}")
        return commit, listing

    def _kept_listing(self, model_id: str, commit: str) -> Listing | None:
        try:
            changed = self._cache.listing_path(model_id, commit).stat().st_mtime_ns
        except OSError:
            return None
        return self._listing(model_id, commit, changed)

    def _read_listing(self, model_id: str, commit: str, changed_ns: int) -> Listing | None:
        """Read a kept listing; `changed_ns` tells a new one from the one read before."""
        return self._cache.listing(model_id, commit)

    def _whole(self, model_id: str, commit: str, name: str, listed: ListedFile) -> HubFile | None:
        """Return a file when all of it is there, and nothing but it."""
        if not is_safe_file(name) or not _ETAG.fullmatch(listed.etag):
            return None
        blob = self._cache.storage(model_id).resolve() / "blobs" / listed.etag
        try:
            real = (self._cache.snapshot(model_id, commit) / name).resolve(strict=True)
            found = real.stat()
        except (OSError, RuntimeError):  # The latter for links in a circle.
            return None
        if real != blob or not stat.S_ISREG(found.st_mode) or found.st_size != listed.size_bytes:
            return None
        return HubFile(real, found, listed.etag)


def hub_ports(listen: HostPort, port: int) -> list[int]:
    """Return the ports to try for a node that listens at `listen`, 0 for any free one.

    `port` is the one that was asked for; 0: the tenth after the node's own, which a firewall is
    easily told and which leaves the ones between to other nodes of the machine, or else any.
    """
    if port:
        return [port]
    return [listen.port + 10, 0] if 0 < listen.port <= MAX_PORT - 10 else [0]


class NodeHub:
    """Serves a cache folder while the node runs. The folder need not exist yet."""

    def __init__(self, folder: Path) -> None:
        self._app = hub_routes(CachedFiles(folder), most_bodies=MAX_BODIES)
        self._server: HubServer | None = None

    async def start(self, listen: HostPort, port: int = 0) -> int:
        """Serve on the host of `listen`, at one of `hub_ports`; return the port.

        Raises ListenError when none can be had.
        """
        *first, last = hub_ports(listen, port)
        for choice in first:
            try:
                return await self._start(HostPort(listen.host, choice))
            except ListenError as error:
                logger.info("%s Taking another port to serve the cache folder.", error)
        return await self._start(HostPort(listen.host, last))

    async def stop(self) -> None:
        """End connections within a second."""
        if self._server is not None:
            await self._server.stop()
            self._server = None

    async def _start(self, listen: HostPort) -> int:
        server = HubServer(self._app, listen)
        address = await server.start()
        self._server = server
        logger.info("Serving the cache folder to other nodes on %s", address)
        return address.port
