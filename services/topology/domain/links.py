"""What live nodes observed of each other, and the part of it that is served. No I/O, no clock."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from services.topology.domain.model import Link, Misdirection, Node, in_order
from services.topology.domain.rdma import rdma_device
from services.topology.domain.significance import drifted

NodeOf = Callable[[str], Node | None]


@dataclass(frozen=True)
class _Report:
    """The newest report of one source."""

    links: tuple[Link, ...]
    misdirections: tuple[Misdirection, ...]
    # True: the source has not asked every address yet.
    probing: bool = False

    def others(self) -> set[str]:
        return {link.sink for link in self.links} | {found.expected for found in self.misdirections}


@dataclass(frozen=True)
class Relinked:
    """Sources whose links or misdirections are announced anew, with all of theirs."""

    sources: tuple[str, ...]
    links: tuple[Link, ...]
    misdirections: tuple[Misdirection, ...]
    one_way: frozenset[tuple[str, str]]


@dataclass(frozen=True)
class _Shown:
    """What is served, or was last announced, of one source."""

    links: tuple[Link, ...] = ()
    misdirections: tuple[Misdirection, ...] = ()


_NOTHING = _Shown()


class LinkTable:
    """The links and misdirections by source.

    Served are those between live nodes at addresses that the sink advertises; the rest waits, in
    case the sink reports later. `node_of` returns a live node. What one call costs depends on the
    links of the sources that it concerns, not on all there are.
    """

    def __init__(self, node_of: NodeOf) -> None:
        self._node_of = node_of
        self._reports: dict[str, _Report] = {}
        # Who reported something of a node, live or not.
        self._observers: dict[str, set[str]] = {}
        self._shown: dict[str, _Shown] = {}
        self._announced: dict[str, _Shown] = {}
        self._sinks: dict[str, frozenset[str]] = {}
        self._one_way: set[tuple[str, str]] = set()
        # Made again when something differs.
        self._all_one_way: frozenset[tuple[str, str]] | None = None

    def links_by_source(self) -> tuple[tuple[Link, ...], ...]:
        """Return all links, those of each source the same object until one of them differs."""
        shown = self._shown
        return tuple(shown[source].links for source in sorted(shown) if shown[source].links)

    def links_of(self, source: str) -> tuple[Link, ...]:
        """Return the links of one source."""
        return self._shown.get(source, _NOTHING).links

    def misdirections(self) -> tuple[Misdirection, ...]:
        """Return all misdirections, in order."""
        found = (m for shown in self._shown.values() for m in shown.misdirections)
        return tuple(sorted(found, key=lambda misdirection: misdirection.key))

    def one_way(self) -> frozenset[tuple[str, str]]:
        """Return the (source, sink) pairs without a link back; the same until one differs."""
        if self._all_one_way is None:
            self._all_one_way = frozenset(self._one_way)
        return self._all_one_way

    def has_report(self, source: str) -> bool:
        """Say whether a report of the source's present run is held."""
        return source in self._reports

    def is_probing(self, source: str) -> bool:
        """Say whether a source's links may not be all verified yet: none are reported, or it says
        that it is still at it."""
        report = self._reports.get(source)
        return report is None or report.probing

    def concerned(self, node_id: str) -> set[str]:
        """Return the sources whose links may look different when this node does."""
        return {node_id, *self._observers.get(node_id, ())}

    def count(self, sources: Iterable[str]) -> int:
        """Return how many links these sources reported."""
        return sum(len(self._reports[s].links) for s in sources if s in self._reports)

    def report(
        self,
        source: str,
        links: Iterable[Link],
        misdirections: Iterable[Misdirection],
        *,
        probing: bool = False,
    ) -> bool:
        """Replace what a live source observed; say whether that is worth an announcement.

        If so it is served with the next `announce`, else at once.
        """
        ordered = tuple(sorted(misdirections, key=lambda misdirection: misdirection.key))
        news = self.is_probing(source) is not probing
        self._put(source, _Report(in_order(links), ordered, probing))
        shown = self._visible(source)
        if news or _news(self._announced.get(source, _NOTHING), shown):
            return True
        self._show(source, shown)
        return False

    def withdraw(self, source: str) -> None:
        """Forget what an earlier run of a source observed; `announce` takes it from sight."""
        self._put(source, None)

    def withdraw_places(self, sink: str, places: Collection[tuple[str, int]]) -> None:
        """Forget links to where a node no longer listens: they have to be verified again.

        Where a link doesn't state its port, the address alone decides.
        """
        hosts = {host for host, _ in places}

        def is_gone(link: Link) -> bool:
            if link.sink != sink or link.sink_address not in hosts:
                return False
            return not link.sink_port or (link.sink_address, link.sink_port) in places

        for source in self.concerned(sink) - {sink}:
            report = self._reports[source]
            kept = tuple(link for link in report.links if not is_gone(link))
            if len(kept) != len(report.links):
                self._put(source, replace(report, links=kept))

    def remove(self, node_ids: Collection[str]) -> None:
        """Forget nodes, all links from and to them, and that those were ever announced.

        Watchers know that a node takes its links along.
        """
        sources = set().union(*(self.concerned(node_id) for node_id in node_ids))
        for node_id in node_ids:
            self._put(node_id, None)
        for source in sources:
            report = self._reports.get(source)
            if report is None:
                self._announced.pop(source, None)
                self._show(source, _NOTHING)
                continue
            self._put(source, _Report(*_without(report, node_ids), report.probing))
            for held in (self._announced, self._shown):
                if source in held:
                    held[source] = _Shown(*_without(held[source], node_ids))
            self._show(source, self._shown.get(source, _NOTHING))

    def announce(self, sources: Iterable[str]) -> Relinked:
        """Serve what these sources observed, and return what watchers have to be told of it."""
        relinked = []
        for source in sorted(sources):
            shown = self._visible(source)
            self._show(source, shown)
            if _news(self._announced.get(source, _NOTHING), shown):
                self._announced[source] = shown
                relinked.append(source)
        told = [self._shown.get(source, _NOTHING) for source in relinked]
        links = tuple(link for shown in told for link in shown.links)
        return Relinked(
            sources=tuple(relinked),
            links=links,
            misdirections=tuple(found for shown in told for found in shown.misdirections),
            one_way=frozenset(self._one_way & {(link.source, link.sink) for link in links}),
        )

    def _put(self, source: str, report: _Report | None) -> None:
        held = self._reports.pop(source, None)
        before = held.others() if held is not None else set()
        after = report.others() if report is not None else set()
        for other in before - after:
            self._observers[other].discard(source)
            if not self._observers[other]:
                del self._observers[other]
        for other in after - before:
            self._observers.setdefault(other, set()).add(source)
        if report is not None:
            self._reports[source] = report

    def _visible(self, source: str) -> _Shown:
        report, own = self._reports.get(source), self._node_of(source)
        if report is None or own is None:
            return _NOTHING
        return _Shown(
            tuple(self._visible_links(own, report.links)),
            tuple(found for found in report.misdirections if self._node_of(found.expected)),
        )

    def _visible_links(self, own: Node, links: Sequence[Link]) -> Iterable[Link]:
        for link in links:
            sink = self._node_of(link.sink)
            if sink is None or not advertised(sink, link):
                continue
            device = rdma_device(own, sink, link.sink_address, link.source_interface)
            yield link if link.rdma_device == device else replace(link, rdma_device=device)

    def _show(self, source: str, shown: _Shown) -> None:
        if shown is _NOTHING:
            self._shown.pop(source, None)
        else:
            self._shown[source] = shown
        before = self._sinks.pop(source, frozenset())
        sinks = frozenset(link.sink for link in shown.links)
        if sinks:
            self._sinks[source] = sinks
        if sinks == before:
            return
        self._all_one_way = None
        for sink in before - sinks:
            self._one_way.discard((source, sink))
            if source in self._sinks.get(sink, ()):
                self._one_way.add((sink, source))
        for sink in sinks - before:
            if source in self._sinks.get(sink, ()):
                self._one_way.discard((sink, source))
            else:
                self._one_way.add((source, sink))


def advertised(sink: Node, link: Link) -> bool:
    """Say whether a live sink listens where a link ends."""
    if link.sink_port:
        return (link.sink_address, link.sink_port) in sink.places
    return link.sink_address in sink.hosts()


def _news(announced: _Shown, shown: _Shown) -> bool:
    return announced.misdirections != shown.misdirections or drifted(announced.links, shown.links)


def _without(
    shown: _Report | _Shown, gone: Collection[str]
) -> tuple[tuple[Link, ...], tuple[Misdirection, ...]]:
    return (
        tuple(link for link in shown.links if link.sink not in gone),
        tuple(found for found in shown.misdirections if found.expected not in gone),
    )
