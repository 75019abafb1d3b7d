from dataclasses import replace
from itertools import pairwise

from services.common.addresses import HostPort
from services.placement.domain.cluster import MESSAGE_BYTES, Link, LinkKind, Node, cluster_of
from services.placement.domain.hosts import (
    FIRST_PORT,
    PORT_COUNT,
    host_lists,
    ring_ports,
    runner_endpoints,
)
from tests.unit.placement.builders import address_of, cluster, node, one_way


def split_hosts(hosts: list[str]) -> list[tuple[str, int]]:
    pairs = [host.rsplit(":", 1) for host in hosts]
    return [(ip, int(port)) for ip, port in pairs]


def test_a_ring_of_one_needs_no_hosts() -> None:
    assert host_lists(cluster({"a": 1}), ["a"], "r") == [[]]


def test_two_ranks_are_each_others_left_and_right() -> None:
    first, second = host_lists(cluster({"a": 1, "b": 1}), ["a", "b"], "r")
    port = split_hosts(first)[0][1]
    assert first == [f"0.0.0.0:{port}", f"{address_of('b')}:{port}"]
    assert second == [f"{address_of('a')}:{port}", f"0.0.0.0:{port}"]


def test_ranks_that_are_no_neighbours_get_the_placeholder() -> None:
    order = ["a", "b", "c", "d"]
    lists = host_lists(cluster(dict.fromkeys(order, 1)), order, "r")
    port = split_hosts(lists[0])[0][1]
    assert lists[1] == [
        f"{address_of('a')}:{port}",
        f"0.0.0.0:{port}",
        f"{address_of('c')}:{port}",
        "198.51.100.1:0",
    ]
    assert [hosts.index("198.51.100.1:0") for hosts in lists] == [2, 3, 0, 1]


def test_ipv6_addresses_are_bracketed() -> None:
    links = [
        Link("a", "b", "fd00::b", LinkKind.ETHERNET),
        Link("b", "a", "fd00::a", LinkKind.ETHERNET),
    ]
    lists = host_lists(cluster_of([node("a"), node("b")], links), ["a", "b"], "r")
    port = split_hosts(lists[0])[0][1]
    assert lists[0][1] == f"[fd00::b]:{port}"


def test_the_link_is_chosen_by_kind_then_round_trip_then_address() -> None:
    def chosen(*links: Link) -> str:
        return cluster_of([node("a"), node("b")], links).best_links["a", "b"].address

    kinds = list(LinkKind)
    assert [kind.name for kind in kinds] == [
        "THUNDERBOLT",
        "MAYBE_ETHERNET",
        "ETHERNET",
        "WIFI",
        "UNKNOWN",
        "VIRTUAL",
        "OVERLAY",
    ]
    for better, worse in pairwise(kinds):
        # Even where the worse kind has the shorter round trip.
        assert chosen(Link("a", "b", "x", worse, 1), Link("a", "b", "y", better, 9)) == "y"
    wifi = LinkKind.WIFI
    assert chosen(Link("a", "b", "x", wifi, 9), Link("a", "b", "y", wifi, 1)) == "y"
    assert chosen(Link("a", "b", "x", wifi, None), Link("a", "b", "y", wifi, 9)) == "y"
    assert chosen(Link("a", "b", "y", wifi, 5), Link("a", "b", "x", wifi, 5)) == "x"


def measured(address: str, kind: LinkKind, hop: int, rate: int = 10**9) -> Link:
    """A link from a to b whose round trip and transfers make up this hop."""
    transfer = 2 * MESSAGE_BYTES * 10**9 // rate
    return Link("a", "b", address, kind, hop - transfer, rate)


def chosen(*links: Link) -> str:
    return cluster_of([node("a"), node("b")], links).best_links["a", "b"].address


def test_of_measured_links_the_fastest_is_chosen_whatever_its_kind() -> None:
    wifi = measured("10.0.0.1", LinkKind.WIFI, 1_000_000)
    overlay = measured("10.0.0.2", LinkKind.OVERLAY, 800_000)
    assert wifi.hop_nanoseconds(MESSAGE_BYTES) == 1_000_000
    assert chosen(wifi, overlay) == "10.0.0.2"
    # What a fast start is worth depends on what follows it.
    quick_but_narrow = measured("10.0.0.3", LinkKind.ETHERNET, 900_000 + 3_276_800, 10**7)
    assert quick_but_narrow.round_trip_nanoseconds == 900_000
    assert chosen(wifi, quick_but_narrow) == "10.0.0.1"


def test_links_within_a_fifth_are_chosen_by_kind() -> None:
    slower = measured("10.0.0.1", LinkKind.ETHERNET, 1_200_000)
    wifi = measured("10.0.0.2", LinkKind.WIFI, 1_000_000)
    assert chosen(slower, wifi) == "10.0.0.1"
    assert chosen(measured("10.0.0.1", LinkKind.ETHERNET, 1_200_001), wifi) == "10.0.0.2"
    # One that nobody has measured yet may be as fast.
    assert chosen(Link("a", "b", "10.0.0.9", LinkKind.THUNDERBOLT), wifi, slower) == "10.0.0.9"
    assert chosen(Link("a", "b", "10.0.0.9", LinkKind.OVERLAY, 1), wifi, slower) == "10.0.0.1"


def test_both_directions_use_one_physical_link() -> None:
    def between(a: str, b: str, kind: LinkKind, there: int, back: int) -> list[Link]:
        """The cable between these interfaces, which are named as their addresses."""
        rate = 10**9
        return [
            Link("a", "b", b, kind, there, rate, a, b),
            Link("b", "a", a, kind, back, rate, b, a),
        ]

    cable = between("tb-a", "tb-b", LinkKind.THUNDERBOLT, 50_000, 90_000)
    lan = between("lan-a", "lan-b", LinkKind.ETHERNET, 200_000, 60_000)

    def used(*links: Link) -> tuple[str, str]:
        best = cluster_of([node("a"), node("b")], links).best_links
        return (best["a", "b"].address, best["b", "a"].address)

    # Alone, the way back over the LAN would be the faster one by far.
    assert used(*cable, *lan) == used(*lan, *cable) == ("tb-b", "tb-a")
    # A cable that works in one direction only is none.
    assert used(cable[0], *lan) == ("lan-b", "lan-a")
    # Where nothing is known of interfaces, each direction takes its best.
    unknown = [replace(link, source_interface="") for link in (*cable, *lan)]
    assert used(*unknown) == ("tb-b", "lan-a")


def test_ranks_at_one_address_get_a_port_each() -> None:
    lab = frozenset({"127.0.0.1"})
    ports = ring_ports("r", [lab, lab, frozenset({"10.0.0.9"}), lab])
    first = ports[0] - FIRST_PORT
    assert [(port - FIRST_PORT - first) % PORT_COUNT for port in ports] == [0, 1, 0, 2]


def test_ports_follow_from_the_request_id_and_stay_in_range() -> None:
    shared = [frozenset({"127.0.0.1"})] * 3
    drawn = [ring_ports(f"r{i}", shared) for i in range(5000)]
    assert all(FIRST_PORT <= port <= 65000 for ports in drawn for port in ports)
    assert all(len(set(ports)) == 3 for ports in drawn)
    # Both ends of the range are drawn, so wrapping round is among what was tried.
    assert {FIRST_PORT, 65000} <= {port for ports in drawn for port in ports}
    assert drawn[7] == ring_ports("r7", shared)


def test_a_ring_on_one_machine_names_every_ranks_own_port() -> None:
    order = ["a", "b", "c"]
    links = [
        Link(source, sink, "127.0.0.1", LinkKind.VIRTUAL)
        for source in order
        for sink in order
        if source != sink
    ]
    lists = host_lists(cluster_of(map(node, order), links), order, "r")
    ports = [split_hosts(hosts)[rank][1] for rank, hosts in enumerate(lists)]
    assert len(set(ports)) == 3
    for rank, hosts in enumerate(lists):
        for other, (ip, port) in enumerate(split_hosts(hosts)):
            assert (ip, port) == ("0.0.0.0" if other == rank else "127.0.0.1", ports[other])


def test_endpoints_verified_from_the_ring_come_first() -> None:
    points = tuple(HostPort(host, 52420) for host in ("10.0.0.1", "10.1.0.1", "10.2.0.1"))
    nodes = [Node("a", "a", 1, (), points), node("b"), node("c")]
    links = [
        Link("b", "a", "10.2.0.1", LinkKind.ETHERNET),
        Link("c", "a", "10.1.0.1", LinkKind.ETHERNET),
        one_way("a", "b"),
    ]
    found = runner_endpoints(cluster_of(nodes, links), "a", ["a", "b"])
    assert [point.host for point in found] == ["10.2.0.1", "10.0.0.1", "10.1.0.1"]
