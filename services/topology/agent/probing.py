"""Which addresses to probe, when, and which links follow. Plain data and decisions, no I/O."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import median_low

from services.common.addresses import HostPort
from services.topology.domain.addresses import IpNetwork, can_link, parsed
from services.topology.domain.model import (
    InterfaceKind,
    Link,
    Misdirection,
    Node,
    Throughput,
    in_order,
)

# A link goes after this many probes in a row without an answer.
MISSES_TO_LOSE = 3
# In intervals, how soon an address is asked again: where it answers (nothing but the idle cost of
# a cluster depends on it, the leases tell of nodes that die), and where it has long been silent.
ANSWERED_FACTOR = 2
SILENT_FACTOR = 5
# How many recent round trips a link's figure is the fastest of.
KEPT_ROUND_TRIPS = 8
# By how much, and beyond a factor of two, all of them must differ from when the throughput was
# measured for it to be measured again before its time.
ANOTHER_WIRE_NS = 1_000_000


@dataclass(frozen=True)
class Target:
    """Where one other node says it can be reached."""

    node_id: str
    address: HostPort


@dataclass(frozen=True)
class Answered:
    """The expected node answered; the time there and back in nanoseconds.

    `source_interface` is the own interface by which the way there leaves, "" where not known.
    """

    round_trip_ns: int
    source_interface: str = ""


@dataclass(frozen=True)
class AnsweredByOther:
    """Another node answered, or one that did not repeat the nonce (then `node_id` is "")."""

    node_id: str


@dataclass(frozen=True)
class Silent:
    """Nobody answered, and what was seen instead."""

    why: str


Outcome = Answered | AnsweredByOther | Silent


@dataclass(frozen=True)
class Measured:
    """What a burst reached, and the fastest round trip at that time."""

    throughput: Throughput
    round_trip_ns: int


@dataclass(frozen=True)
class Probed:
    """What is known of one target. `start_ns` is the run of the peer that was last probed.

    `burst_due` says when the throughput is to be measured, while the target is verified.
    """

    kind: InterfaceKind
    start_ns: int
    due: float
    verified: bool = False
    misses: int = 0
    round_trips_ns: tuple[int, ...] = ()
    other: str | None = None
    source_interface: str = ""
    burst_due: float = 0.0
    measured: Measured | None = None

    @property
    def asked(self) -> bool:
        """True once it is known whether the expected node answers there."""
        return self.verified or self.misses > 0 or self.other is not None

    def current_throughput(self, now: float) -> Throughput | None:
        """Return the throughput, None when it is unknown or too old."""
        if self.measured is None or not self.measured.throughput.is_current(now):
            return None
        return self.measured.throughput


def after(probed: Probed, outcome: Outcome, now: float, interval: float) -> Probed:
    """Return what is known after a probe, and when the next is due.

    One good probe verifies. An answer by another node ends a link at once; silence only after
    MISSES_TO_LOSE probes in a row.
    """
    if isinstance(outcome, Answered):
        recent = (*probed.round_trips_ns, outcome.round_trip_ns)[-KEPT_ROUND_TRIPS:]
        interface = outcome.source_interface or probed.source_interface
        moved = probed.verified and probed.source_interface != interface
        anew = not probed.verified or moved or _is_another_wire(probed.measured, recent)
        return replace(
            probed,
            verified=True,
            misses=0,
            round_trips_ns=recent,
            other=None,
            due=now + interval * ANSWERED_FACTOR,
            source_interface=interface,
            burst_due=min(probed.burst_due, now) if anew else probed.burst_due,
            measured=None if moved else probed.measured,
        )
    misses = probed.misses + 1
    lost = isinstance(outcome, AnsweredByOther) or misses >= MISSES_TO_LOSE
    return replace(
        probed,
        verified=probed.verified and not lost,
        misses=misses,
        round_trips_ns=() if lost else probed.round_trips_ns,
        measured=None if lost else probed.measured,
        other=outcome.node_id if isinstance(outcome, AnsweredByOther) else None,
        due=now + interval * (SILENT_FACTOR if misses >= MISSES_TO_LOSE else 1),
    )


def _is_another_wire(measured: Measured | None, round_trips_ns: tuple[int, ...]) -> bool:
    """Say whether all round trips are so different that the throughput may well be, too."""
    if measured is None or len(round_trips_ns) < KEPT_ROUND_TRIPS:
        return False
    before, fastest = sorted((measured.round_trip_ns, min(round_trips_ns)))
    return fastest > 2 * before and fastest - before > ANOTHER_WIRE_NS


def after_burst(
    probed: Probed, bytes_per_second: int, now: float, *, wait_seconds: float
) -> Probed:
    """Return what is known after a burst; the next is due in `wait_seconds`."""
    measured = Measured(Throughput(bytes_per_second, now), min(probed.round_trips_ns, default=0))
    return replace(probed, measured=measured, burst_due=now + wait_seconds)


def next_burst(table: Mapping[Target, Probed]) -> tuple[Target | None, float]:
    """Return the verified target whose burst is due first and when that is; None: there is none."""
    verified = ((p.burst_due, target) for target, p in table.items() if p.verified)
    due, target = min(verified, key=lambda pair: pair[0], default=(0.0, None))
    return target, due


def retargeted(
    table: Mapping[Target, Probed],
    own: Node,
    peers: Iterable[Node],
    now: float,
    *,
    lab: bool,
    networks: Collection[IpNetwork] = (),
) -> dict[Target, Probed]:
    """Return the table for the peers as they are now; `networks`: leave out what is in none of
    them, if there are any.

    New addresses are due at once, as are those of a peer that has started anew; addresses that
    are no longer advertised go, and their links with them. Left out: addresses that join no two
    machines, host names (a ring needs addresses), and what this node listens on itself, such as a
    container bridge that has the same address on every machine.
    """
    result = {}
    for peer in peers:
        if peer.node_id == own.node_id:
            continue
        for endpoint in peer.endpoints:
            address = parsed(endpoint.host)
            if address is None or not can_link(address, lab=lab) or endpoint in own.endpoints:
                continue
            if networks and not any(address in network for network in networks):
                continue
            target, kind = Target(peer.node_id, endpoint), peer.kind_of(endpoint.host)
            known = table.get(target, Probed(kind, peer.start_ns, due=now))
            if known.start_ns != peer.start_ns:
                known = replace(known, start_ns=peer.start_ns, due=now)
            result[target] = replace(known, kind=kind)
    return result


def links_of(source: str, table: Mapping[Target, Probed], now: float) -> tuple[Link, ...]:
    """Return the verified links, with fastest and median of the recent round trips.

    A throughput that is too old by now is left out. Where a peer listens on several ports of one
    address, that is still one link.
    """
    best: dict[tuple[str, str, str], Link] = {}
    for target, probed in table.items():
        if not probed.verified:
            continue
        link = Link(
            source=source,
            sink=target.node_id,
            sink_address=target.address.host,
            kind=probed.kind,
            round_trip_ns=min(probed.round_trips_ns),
            round_trip_median_ns=median_low(probed.round_trips_ns),
            throughput=probed.current_throughput(now),
            sink_port=target.address.port,
            source_interface=probed.source_interface,
        )
        held = best.get(link.key)
        if held is None or link.round_trip_ns < held.round_trip_ns:
            best[link.key] = link
    return in_order(best.values())


def misdirections_of(source: str, table: Mapping[Target, Probed]) -> tuple[Misdirection, ...]:
    """Return the addresses where another node than expected answered last."""
    return tuple(
        Misdirection(source, target.node_id, probed.other, target.address.host, target.address.port)
        for target, probed in table.items()
        if probed.other is not None
    )
