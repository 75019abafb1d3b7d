"""Fetches the files of one download: asks where from, has the child fetch, deals with faults."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping

from services.downloads.worker.assigner import Assigner
from services.downloads.worker.fetcher import Fetcher
from services.downloads.worker.limits import SharedRate, Slots
from services.downloads.worker.meter import Meter
from services.downloads.worker.partial import names_content
from services.downloads.worker.plan import Plan
from services.downloads.worker.protocol import FileOrder, Outcome
from services.downloads.worker.schedule import Neighbour, Schedule
from services.downloads.worker.ways import Ways

logger = logging.getLogger(__name__)


class Gathering:
    """One run over the files that a download lacks."""

    def __init__(
        self,
        plan: Plan,
        etags: Mapping[str, str],
        schedule: Schedule,
        meter: Meter,
        fetcher: Fetcher,
        assigner: Assigner,
        ways: Ways,
        slots: Slots,
        rate: SharedRate,
    ) -> None:
        self._model_id = plan.model_id
        self._commit = plan.known.commit
        self._sizes = {file.name: file.size_bytes for file in plan.files}
        self._etags = etags
        self._schedule = schedule
        self._meter = meter
        self._fetcher = fetcher
        self._assigner = assigner
        self._ways = ways
        self._slots = slots
        self._rate = rate
        self._running: dict[asyncio.Future[Outcome], str] = {}
        self._event = asyncio.Event()

    async def run(self) -> None:
        """Fetch everything; raise the first error that no other source or try can mend.

        What the child still fetches then, or when this is cancelled, ends with the child.
        """
        try:
            while not self._schedule.done:
                self._event.clear()
                await self._begin_what_may()
                await self._something_happens()
                self._take_outcomes()
        finally:
            self._slots.take(self._wake, 0)
            self._slots.give_back(len(self._running))
            self._rate.leave(self._fetcher.limit)
            for outcome in self._running:
                if not outcome.cancel() and not outcome.cancelled():
                    # One that failed together with the one that was raised.
                    outcome.exception()
            if self._schedule.held:
                self._assigner.release(self._model_id, self._commit, sorted(self._schedule.held))

    async def _begin_what_may(self) -> None:
        now = time.monotonic()
        direct, asked = self._schedule.for_hub(now), self._schedule.to_ask(now)
        free = self._slots.take(self._wake, len(direct) + len(asked))
        try:
            for name in direct[:free]:
                self._begin(name, None)
                free -= 1
            if free and asked:
                free -= await self._ask(asked, free)
                now = time.monotonic()
                if free and (self._schedule.for_hub(now) or self._schedule.to_ask(now)):
                    self._wake()
        finally:
            self._slots.give_back(free)

    async def _ask(self, names: list[str], most: int) -> int:
        """Have the service assign sources, and begin there; return how many were begun."""
        assignment = await self._assigner.assign(
            self._model_id,
            self._commit,
            names,
            most,
            self._schedule.excluded(time.monotonic()),
        )
        chosen = self._schedule.assigned(assignment, self._ways, time.monotonic())
        begun = list(chosen.items())[:most]
        for name, neighbour in begun:
            self._begin(name, neighbour)
        return len(begun)

    def _begin(self, name: str, neighbour: Neighbour | None) -> None:
        node_id = neighbour.node_id if neighbour else ""
        if neighbour and not names_content(self._etags.get(name, "")):
            # Nothing would tell whether what it sends is right.
            node_id, neighbour = "", None
        if not self._running:
            self._rate.join(self._fetcher.limit)
        self._schedule.begin(name, node_id)
        self._meter.begin(name, node_id)
        outcome = self._fetcher.fetch(
            FileOrder(
                name,
                self._sizes[name],
                self._etags.get(name, ""),
                node_id,
                neighbour.endpoint if neighbour else "",
            )
        )
        self._running[outcome] = name
        outcome.add_done_callback(lambda _: self._wake())

    async def _something_happens(self) -> None:
        now = time.monotonic()
        at = self._schedule.next_time(now)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if at is None else at - now):
                await self._event.wait()

    def _take_outcomes(self) -> None:
        for future in [future for future in self._running if future.done()]:
            del self._running[future]
            self._slots.give_back()
            if not self._running:
                # While nothing comes, others may have its share.
                self._rate.leave(self._fetcher.limit)
            outcome = future.result()
            self._meter.end(outcome)
            known = self._schedule.is_liar(outcome.node_id)
            error = self._schedule.end(outcome, time.monotonic())
            if error is not None:
                raise error
            if outcome.fault is not None and outcome.node_id:
                logger.info("Node %s did not give %s", outcome.node_id, outcome.name)
            if self._schedule.is_liar(outcome.node_id) and not known:
                logger.warning(
                    "Nothing of %s is taken from node %s any more: %s",
                    self._model_id,
                    outcome.node_id,
                    outcome.message,
                )

    def _wake(self) -> None:
        self._event.set()
