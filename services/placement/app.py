"""The use cases: read what is known, search in a thread, answer."""

import asyncio
import contextvars
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

from opentelemetry import trace

from services.common import deadline
from services.common.errors import Reason, ShardringError
from services.placement.domain.budget import Stopped
from services.placement.domain.candidates import Download
from services.placement.domain.cluster import Cluster, RingBackend
from services.placement.domain.decide import Preview, place, preview
from services.placement.domain.model import Model, Sharding
from services.placement.domain.placement import Placement
from services.placement.domain.refusals import check_cluster, for_now
from services.placement.domain.request import PlacementRequest
from services.placement.turns import Turns

# Longest that one search may take, with its waits for turns, where the caller gives no less.
SEARCH_SECONDS = 120.0
# More searches at once than this wait until one of them has ended.
MOST_SEARCHES = 256

# What may be over in a moment: a service that restarts, and what it then has to be told anew.
_PASSING = frozenset(
    {
        Reason.SERVICE_UNAVAILABLE,
        Reason.TOPOLOGY_GATHERING,
        Reason.LINKS_NOT_VERIFIED,
        Reason.NO_WORKERS,
    }
)
_LOOK_AGAIN_SECONDS = 0.2

Answer = TypeVar("Answer")
_Decision = Callable[
    [Cluster, Model, Mapping[str, Download], PlacementRequest, Callable[[], bool]], Answer
]

tracer = trace.get_tracer(__name__)


class TopologyReader(Protocol):
    """Where the cluster is read from."""

    async def cluster(self) -> Cluster:
        """Return everything known now."""


class DownloadsReader(Protocol):
    """Where models and what is on the nodes' disks are read from."""

    async def model(self, model_id: str, revision: str) -> Model:
        """Return what the model's own files say."""

    async def downloads(self, model_id: str, revision: str) -> Mapping[str, Download]:
        """Return how much of the model each node has."""


class PlacementApp:
    """Decides placements. Holds nothing between calls. Close it.

    What topology or downloads lack while they restart is waited for, up to `patience_seconds`.
    """

    def __init__(
        self,
        topology: TopologyReader,
        downloads: DownloadsReader,
        *,
        patience_seconds: float = 0.0,
    ) -> None:
        self._topology, self._downloads = topology, downloads
        self._patience_seconds = patience_seconds
        self._turns = Turns()
        # They mostly wait for their turn; a thread is only started when one is needed.
        self._threads = ThreadPoolExecutor(MOST_SEARCHES, "search")

    def close(self) -> None:
        """Let go of the threads; searches that somebody waits for still end."""
        self._threads.shutdown(wait=False)

    async def place(self, request: PlacementRequest) -> Placement:
        """Choose the ring. Raises ShardringError with the reasons when there is none."""
        return await self._decide(place, request)

    async def preview(
        self, request: PlacementRequest, ways: Sequence[tuple[Sharding, RingBackend]]
    ) -> list[Preview]:
        """Return for each way, and each ring size, what `place` would give or raise."""

        def previews(
            cluster: Cluster,
            model: Model,
            downloads: Mapping[str, Download],
            request: PlacementRequest,
            stopped: Callable[[], bool],
        ) -> list[Preview]:
            return preview(cluster, model, downloads, request, ways, stopped)

        return await self._decide(previews, request)

    async def _decide(self, decision: "_Decision[Answer]", request: PlacementRequest) -> Answer:
        until = time.monotonic() + deadline.leaving_time(self._patience_seconds)
        while True:
            try:
                return await self._decide_now(decision, request)
            except ShardringError as refusal:
                left = until - time.monotonic()
                if refusal.reason not in _PASSING or left < _LOOK_AGAIN_SECONDS:
                    raise
            await asyncio.sleep(_LOOK_AGAIN_SECONDS)

    async def _decide_now(self, decision: "_Decision[Answer]", request: PlacementRequest) -> Answer:
        cluster, model, downloads = await self._read(request)
        with tracer.start_as_current_span(
            "search", attributes={"node_count": len(cluster.nodes), "model_id": model.model_id}
        ):
            return await self._in_turn(
                lambda stopped: decision(cluster, model, downloads, request, stopped)
            )

    async def _read(
        self, request: PlacementRequest
    ) -> tuple[Cluster, Model, Mapping[str, Download]]:
        """Read all three at once; of several faults, always the same one is raised.

        What the cluster lacks goes first: without nodes the downloads service knows no model.
        """
        asked = (request.model_id, request.revision)
        model = asyncio.create_task(self._downloads.model(*asked))
        downloads = asyncio.create_task(self._downloads.downloads(*asked))
        try:
            cluster = await self._topology.cluster()
            try:
                check_cluster(cluster, request)
            except ShardringError as refusal:
                raise for_now(cluster, refusal) from None
            return cluster, await model, await downloads
        finally:
            for task in (model, downloads):
                task.cancel()
            await asyncio.gather(model, downloads, return_exceptions=True)

    async def _in_turn(self, search: Callable[[Callable[[], bool]], Answer]) -> Answer:
        """Run a search in a thread, by turns, until the caller is gone or its time is up."""
        until = time.monotonic() + deadline.leaving_time(SEARCH_SECONDS)
        abandoned = threading.Event()

        def run() -> Answer:
            with self._turns.turn(until) as turn:

                def stopped() -> bool:
                    turn.give_way()
                    return abandoned.is_set() or time.monotonic() > until

                if abandoned.is_set():
                    raise Stopped
                return search(stopped)

        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._threads, contextvars.copy_context().run, run)
        except (Stopped, TimeoutError) as stopped:
            raise ShardringError(
                Reason.SERVICE_TIMEOUT,
                "The search for a ring did not end in the time the caller gave. Give it more.",
                metadata={"service": "placement", "address": ""},
            ) from stopped
        finally:
            abandoned.set()
