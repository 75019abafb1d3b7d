"""How a node ranks its ways to another node."""

from services.cli.node import ways_to
from services.downloads.worker.ways import Way
from services.topology.domain.model import InterfaceKind, Link, Throughput


def link(address: str, round_trip_ns: int, rate: int | None = None, sink: str = "b") -> Link:
    measured = None if rate is None else Throughput(rate, 1.0)
    return Link("a", sink, address, InterfaceKind.ETHERNET, round_trip_ns, throughput=measured)


def test_the_measured_come_first_and_then_the_nearest() -> None:
    links = [
        link("far", 900),
        link("wire", 500, 10**9),
        link("elsewhere", 1, 10**12, sink="c"),
        link("near", 100),
        link("radio", 200, 10**7),
        link("same wire", 400, 10**9),
    ]
    assert ways_to("b", links) == [
        Way("same wire", 10**9),
        Way("wire", 10**9),
        Way("radio", 10**7),
        Way("near", None),
        Way("far", None),
    ]
    assert ways_to("d", links) == []
