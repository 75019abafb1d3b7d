"""Which file of a download is fetched next, from where, and what a fault costs.

Plain decisions: nothing here waits, sends or reads a clock. Times are seconds of one clock.
"""

import collections
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from services.common.addresses import HostPort
from services.common.errors import ShardringError
from services.common.security import current_security
from services.downloads.worker.protocol import Fault, Outcome
from services.downloads.worker.ways import Ways

# How long a neighbour that stalled, and one without a way there, is left out.
AWAY_SECONDS = 30.0
NO_WAY_SECONDS = 10.0
# Of how many files is asked at a time.
MOST_ASKED = 500
# How long the service is not asked after it did not answer.
NO_SERVICE_SECONDS = 5.0
# How often more is asked for while the hub lets this node wait.
HUB_WAITS_SECONDS = 5.0
# Tries of a file that the hub sends wrong.
MAX_LIES = 3
# The most that a hub may ask for in all before another byte comes.
MAX_TOLD_SECONDS = 3600.0
_FIRST_BACKOFF_SECONDS = 1.0
_LAST_BACKOFF_SECONDS = 30.0
LEAST_RETRY_SECONDS = 0.05


@dataclass(frozen=True)
class Holder:
    """A node that has a file whole, and the port where it serves it."""

    node_id: str
    port: int


@dataclass(frozen=True)
class Assignment:
    """Who to take each file from; nobody: the hub. `retry_seconds`: when to ask for the others."""

    holders: dict[str, tuple[Holder, ...]]
    retry_seconds: float | None


@dataclass(frozen=True)
class Neighbour:
    """A node to take a file from, at an address where it is reached."""

    node_id: str
    address: HostPort

    @property
    def endpoint(self) -> str:
        """The address as a hub's."""
        scheme = "http" if current_security().tls is None else "https"
        return f"{scheme}://{self.address}"


def best_neighbour(
    holders: Sequence[Holder], ways: Ways, loads: Mapping[str, int], excluded: Collection[str]
) -> Neighbour | None:
    """Return the node that promises most for one more transfer; None when none is reached.

    `loads` counts the transfers under way from each node. A way that nobody measured counts as
    the slowest; of equals the less loaded one is taken, then the first by id.
    """
    best: tuple[float, int, str] | None = None
    chosen = None
    for holder in holders:
        there = ways(holder.node_id) if holder.node_id not in excluded else ()
        if not there:
            continue
        load = loads.get(holder.node_id, 0)
        rank = (-(there[0].bytes_per_second or 1) / (load + 1), load, holder.node_id)
        if best is None or rank < best:
            best = rank
            chosen = Neighbour(holder.node_id, HostPort(there[0].host, holder.port))
    return chosen


class Schedule:
    """What is left of one download, and what is known of its sources.

    A name is waiting, under way, or done. The service leaves some to this node to fetch from the
    hub (`held`); those in `hub_only` it is never asked about.
    """

    def __init__(
        self,
        names: Sequence[str],
        now: float,
        patience_seconds: float,
        *,
        hub_only: Sequence[str] = (),
    ) -> None:
        self._waiting = dict.fromkeys(names, now)
        self._under_way: dict[str, str] = {}
        self.held: set[str] = set()
        self._hub_only = set(hub_only)
        self._patience = patience_seconds
        self._lies: collections.Counter[str] = collections.Counter()
        self._failures: collections.Counter[str] = collections.Counter()
        self._kept: dict[str, int] = {}
        self._liars: set[str] = set()
        self._away: dict[str, float] = {}
        self._ask_at = self._hub_at = self._no_service_until = now
        # Since when no byte was gained, and what the hub asked to wait since.
        self._gained_at = now
        self._told = 0.0

    @property
    def done(self) -> bool:
        """True when nothing is left."""
        return not self._waiting and not self._under_way

    def for_hub(self, now: float) -> list[str]:
        """Return the names that may now be fetched from the hub without asking."""
        if now < self._hub_at:
            return []
        alone = now < self._no_service_until
        return [
            name
            for name, at in self._waiting.items()
            if at <= now and (alone or self._is_for_hub(name))
        ]

    def to_ask(self, now: float) -> list[str]:
        """Return the names to ask the service about now."""
        if now < self._ask_at or now < self._no_service_until:
            return []
        names = [
            name for name, at in self._waiting.items() if at <= now and not self._is_for_hub(name)
        ]
        return names[:MOST_ASKED]

    def next_time(self, now: float) -> float | None:
        """Return when there may be something to begin that there is not now."""
        times = []
        for name, at in self._waiting.items():
            if self._is_for_hub(name):
                times.append(max(at, self._hub_at))
            elif now < self._no_service_until:
                # Either the hub may be asked, or the service again.
                times.append(max(at, min(self._no_service_until, max(now, self._hub_at))))
            else:
                times.append(max(at, self._ask_at))
        return min((time for time in times if time > now), default=None)

    def excluded(self, now: float) -> list[str]:
        """Return the nodes that nothing is taken from now."""
        return sorted(
            self._liars | {node_id for node_id, until in self._away.items() if until > now}
        )

    def loads(self) -> Mapping[str, int]:
        """Return how many files are under way from each node."""
        return collections.Counter(self._under_way.values())

    def assigned(
        self, assignment: Assignment | None, ways: Ways, now: float
    ) -> dict[str, Neighbour | None]:
        """Take in what the service says; return what to begin, None for the hub."""
        if assignment is None:
            self._no_service_until = now + NO_SERVICE_SECONDS
            return {}
        retry = assignment.retry_seconds
        if retry is None and not assignment.holders:
            retry = NO_SERVICE_SECONDS
        if retry is not None:
            self._ask_at = now + max(retry, LEAST_RETRY_SECONDS)
        chosen: dict[str, Neighbour | None] = {}
        loads = dict(self.loads())
        for name, holders in assignment.holders.items():
            if name not in self._waiting:
                continue
            if not holders:
                self.held.add(name)
                if now >= self._hub_at:
                    chosen[name] = None
                else:
                    # What the hub lets nobody fetch now need not be held here.
                    self._ask_at = max(self._ask_at, min(self._hub_at, now + HUB_WAITS_SECONDS))
                continue
            neighbour = best_neighbour(holders, ways, loads, self.excluded(now))
            if neighbour is None:
                # Asked for again soon, without these.
                self._away |= {holder.node_id: now + NO_WAY_SECONDS for holder in holders}
                self._ask_at = now + LEAST_RETRY_SECONDS
            else:
                loads[neighbour.node_id] = loads.get(neighbour.node_id, 0) + 1
                chosen[name] = neighbour
        return chosen

    def begin(self, name: str, node_id: str) -> None:
        """Note that a file is under way, from a node or ("") the hub."""
        del self._waiting[name]
        self._under_way[name] = node_id

    def end(self, outcome: Outcome, now: float) -> ShardringError | None:
        """Note how a file went; return the error when the download cannot go on."""
        name = outcome.name
        del self._under_way[name]
        if outcome.fault is None:
            self.held.discard(name)
            self._gained(now)
            return None
        self._waiting[name] = now
        if outcome.fault is Fault.LOCAL:
            return outcome.error
        if outcome.kept_bytes > self._kept.get(name, 0):
            # What is received and thrown away again and again is no gain.
            self._kept[name], self._failures[name] = outcome.kept_bytes, 0
            self._gained(now)
        if outcome.fault is Fault.MIXED:
            # Whoever it was: from the start, and from where it certainly comes right.
            self._hub_only.add(name)
            return self._lied(outcome, now)
        if outcome.node_id:
            if outcome.fault is Fault.LIED:
                self._liars.add(outcome.node_id)
            else:
                # One that has too many to serve says when it has not.
                wait = AWAY_SECONDS if outcome.wait_seconds is None else outcome.wait_seconds
                self._away[outcome.node_id] = now + min(wait, AWAY_SECONDS)
            self._ask_at = now
            return None
        if outcome.fault is Fault.REFUSED:
            return outcome.error
        if outcome.fault is Fault.LIED:
            return self._lied(outcome, now)
        return self._stalled(outcome, now)

    def is_liar(self, node_id: str) -> bool:
        """True for a node that sent what cannot be true."""
        return node_id in self._liars

    def _gained(self, now: float) -> None:
        self._gained_at, self._told = now, 0.0

    def _lied(self, outcome: Outcome, now: float) -> ShardringError | None:
        self._lies[outcome.name] += 1
        self._waiting[outcome.name] = now + _FIRST_BACKOFF_SECONDS
        return outcome.error if self._lies[outcome.name] >= MAX_LIES else None

    def _stalled(self, outcome: Outcome, now: float) -> ShardringError | None:
        """Wait as the hub says, else longer each time; for so long and no longer."""
        failures = self._failures[outcome.name]
        self._failures[outcome.name] += 1
        wait = min(_FIRST_BACKOFF_SECONDS * 2**failures, _LAST_BACKOFF_SECONDS)
        if outcome.wait_seconds is not None:
            wait = outcome.wait_seconds
            # Meant for every request of this node. Waiting as told costs no patience.
            hub_at = max(self._hub_at, now + wait)
            self._told += hub_at - max(self._hub_at, now)
            self._hub_at = hub_at
        self._waiting[outcome.name] = now + wait
        impatient = now - self._gained_at - self._told > self._patience
        if impatient or self._told > MAX_TOLD_SECONDS:
            return outcome.error
        # Asked for anew: by then another node may have it.
        self.held.discard(outcome.name)
        return None

    def _is_for_hub(self, name: str) -> bool:
        return name in self.held or name in self._hub_only
