"""One file from its source into the cache folder, in huggingface_hub's layout and under its lock.

huggingface_hub itself starts a broken-off file anew, retries by a plan of its own and checks no
hash; here each body goes to blobs/ETAG.incomplete, from where the next try goes on, and becomes
blobs/ETAG only when its content is what its hash says. Files in Xet storage are left to
huggingface_hub altogether.
"""

import importlib.util
import os
from pathlib import Path

import httpx2
from huggingface_hub import constants, hf_hub_download
from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

from services.downloads.worker.budget import Budget
from services.downloads.worker.origin import Offer, Origin, RangeRefused, SourceFault
from services.downloads.worker.partial import Partial, TooLong, names_content
from services.downloads.worker.protocol import Fault, FetchJob, FileOrder


class BlobFetch:
    """Fetches one file. `received_bytes` counts what the source sent, used or not; `kept_bytes`
    what of the file is on disk after it."""

    def __init__(
        self, job: FetchJob, order: FileOrder, neighbours: httpx2.Client, budget: Budget
    ) -> None:
        self._job = job
        self._order = order
        self._origin = Origin(job, order, neighbours)
        self._budget = budget
        self._storage = Path(job.storage)
        self._pointer = self._storage / "snapshots" / job.commit / order.name
        self.received_bytes = 0
        self.kept_bytes = 0

    def run(self) -> None:
        """Bring the file into the snapshot, whole. Raises SourceFault, HTTP's errors, OSError."""
        size = self._order.size_bytes
        if self._pointer.exists() or self._pointer.is_symlink():
            if self._pointer.exists() and self._pointer.stat().st_size == size:
                return
            # Cut short by whoever wrote it: nothing says which bytes of it are right.
            self._pointer.unlink()
        offer = self._origin.offer()
        blob = self._storage / "blobs" / offer.etag
        lock = Path(self._job.cache_dir) / ".locks" / self._storage.name / f"{offer.etag}.lock"
        for folder in (lock.parent, blob.parent, self._pointer.parent):
            folder.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(lock):
            if blob.exists() and blob.stat().st_size != size:
                blob.unlink()
            # Left by a killed process; huggingface_hub never looks at these again.
            for stale in blob.parent.glob(f"{blob.name}.*.incomplete"):
                stale.unlink(missing_ok=True)
            if blob.exists():
                self._link(blob)
                return
            if not (offer.xet and self._xet_allowed()):
                self._receive(blob, offer)
                self._link(blob)
                return
        self._receive_by_xet()

    def _receive(self, blob: Path, offer: Offer) -> None:
        path = blob.with_name(f"{blob.name}.incomplete")
        # Hubs that are not the real one may call anything an ETag; a hash it is when it is listed.
        hashed = len(offer.etag) == 64 or offer.etag == self._order.etag
        if self._order.node_id and not (hashed and names_content(offer.etag)):
            raise self._origin.lied(f"cannot be held to what it sends as {self._order.name}")
        etag = offer.etag if hashed else ""
        with Partial(path, etag, self._order.size_bytes, self._budget) as partial:
            try:
                self._fill(partial, offer)
            except RangeRefused:
                partial.restart()
                self._fill(partial, offer)
            finally:
                self.kept_bytes = partial.length
            if not partial.right():
                resumed = partial.resumed
                partial.restart()
                self.kept_bytes = 0
                fault = self._origin.lied(f"sent {self._order.name} with content other than listed")
                raise SourceFault(Fault.MIXED if resumed else Fault.LIED, fault.error)
        os.replace(path, blob)

    def _fill(self, partial: Partial, offer: Offer) -> None:
        """Receive what is missing; keep what came when the source breaks off."""
        if partial.length == self._order.size_bytes:
            return
        with self._origin.body(offer, partial.length) as body:
            if body.start != partial.length:
                partial.restart()
            try:
                for chunk in body.chunks:
                    self.received_bytes += len(chunk)
                    partial.write(chunk)
            except TooLong as error:
                partial.restart()
                raise self._origin.wrong_size() from error
        if partial.length != self._order.size_bytes:
            partial.restart()
            raise self._origin.wrong_size()

    def _receive_by_xet(self) -> None:
        """Have huggingface_hub fetch and link the file, and count it as received in one piece."""
        job, order = self._job, self._order
        try:
            hf_hub_download(
                job.model_id,
                order.name,
                revision=job.commit,
                cache_dir=job.cache_dir,
                endpoint=job.endpoint,
                token=job.token,
            )
        except RuntimeError as error:
            # So hf_xet reports whatever goes wrong between it and the storage.
            raise self._origin.stalled(f"did not give {order.name} ({error})") from error
        self.received_bytes += order.size_bytes
        if self._pointer.stat().st_size != order.size_bytes:
            self._pointer.resolve().unlink()
            raise self._origin.wrong_size()

    def _xet_allowed(self) -> bool:
        return (
            self._job.xet
            and not constants.HF_HUB_DISABLE_XET
            and importlib.util.find_spec("hf_xet") is not None
        )

    def _link(self, blob: Path) -> None:
        """Make the snapshot show the blob, at once or not at all."""
        temporary = self._pointer.with_name(f".{blob.name[:80]}.link")
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(os.path.relpath(blob, self._pointer.parent))
        os.replace(temporary, self._pointer)
