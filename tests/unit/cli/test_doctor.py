"""Each rule of `shardring doctor`, on topologies put together by hand."""

from collections.abc import Sequence
from typing import Any

import pytest

from services.cli.doctor.bridges import bridge_loops
from services.cli.doctor.findings import Finding, LocalFacts, Probe, View
from services.cli.doctor.local import on_own_subnet, own_networks
from services.cli.doctor.paths import measured_when
from services.cli.doctor.rules import diagnose
from services.cli.render.doctor import findings_list, healthy, verdict
from shardring.common.v1 import common_pb2
from shardring.placement.v1 import placement_pb2
from shardring.runner.v1 import runner_pb2
from shardring.topology.v1 import topology_pb2 as pb
from tests.unit.cli.test_render import shown

ETHERNET, WIFI = pb.INTERFACE_KIND_ETHERNET, pb.INTERFACE_KIND_WIFI
THUNDERBOLT, OVERLAY = pb.INTERFACE_KIND_THUNDERBOLT, pb.INTERFACE_KIND_OVERLAY


def node(node_id: str, *interfaces: pb.NetworkInterface, **fields: Any) -> pb.Node:
    interfaces = interfaces or (interface("en0", ETHERNET, f"10.0.0.{ord(node_id)}"),)
    return pb.Node(
        node_id=node_id,
        name=f"mac-{node_id}",
        interfaces=interfaces,
        endpoints=[
            common_pb2.Endpoint(address=address, port=52420)
            for one in interfaces
            for address in one.addresses
        ],
        **fields,
    )


def interface(name: str, kind: pb.InterfaceKind.ValueType, *addresses: str) -> pb.NetworkInterface:
    return pb.NetworkInterface(name=name, kind=kind, addresses=addresses)


def link(
    source: str,
    sink: str,
    kind: pb.InterfaceKind.ValueType = ETHERNET,
    *,
    address: str = "",
    ms: float = 0.4,
    megabytes: float | None = 110,
    age: float = 5,
) -> pb.Link:
    made = pb.Link(
        source_node_id=source,
        sink_node_id=sink,
        sink_address=address or f"10.0.0.{ord(sink)}",
        kind=kind,
    )
    made.round_trip_median.FromNanoseconds(round(ms * 1e6))
    if megabytes is not None:
        made.throughput_bytes_per_second = round(megabytes * 1e6)
        made.throughput_age.FromNanoseconds(round(age * 1e9))
    return made


def both(
    one: str, other: str, kind: pb.InterfaceKind.ValueType = ETHERNET, **fields: Any
) -> list[pb.Link]:
    return [link(one, other, kind, **fields), link(other, one, kind, **fields)]


def port(
    interface_name: str, domain: str, *peers: str, generation: int = 5, bridge: str = ""
) -> pb.ThunderboltPort:
    return pb.ThunderboltPort(
        interface_name=interface_name,
        domain_id=domain,
        peer_domain_ids=peers,
        generation=generation,
        bridge=bridge,
    )


def findings(
    nodes: Sequence[pb.Node],
    links: Sequence[pb.Link] = (),
    local: LocalFacts | None = None,
    instances: Sequence[runner_pb2.Instance] = (),
    **fields: Any,
) -> list[Finding]:
    topology = pb.Topology(nodes=nodes, links=links, **fields)
    return diagnose(View(topology, local, instances))


def codes(*arguments: Any, **fields: Any) -> list[str]:
    return [finding.code for finding in findings(*arguments, **fields)]


PAIR = [node("a"), node("b")]


def test_a_healthy_cluster_has_nothing_to_say() -> None:
    assert findings(PAIR, both("a", "b")) == []
    assert findings([node("a")]) == []
    assert healthy([])
    assert verdict([], 2, 2) == "2 nodes, 2 links: nothing wrong with this cluster's network."


def test_an_empty_or_young_topology_is_told_apart() -> None:
    assert codes([]) == ["no_nodes"]
    young = findings([], gathering=True)
    assert [(finding.code, finding.note) for finding in young] == [("gathering", True)]
    # What may still come is not missed yet.
    assert codes(PAIR, [], gathering=True) == ["gathering"]


def test_duplicate_ids_name_both_machines() -> None:
    conflict = pb.IdentityConflict(
        node_id="a", held_by="mac-a (10.0.0.97:52420)", claimed_by="copy (10.0.0.9:52420)"
    )
    (found,) = findings(PAIR, both("a", "b"), identity_conflicts=[conflict])
    assert found.code == "duplicate_id"
    assert "mac-a (10.0.0.97:52420)" in found.text
    assert "copy (10.0.0.9:52420)" in found.text
    assert "node-id" in found.remedy


def test_misdirected_addresses_name_who_answers() -> None:
    wrong = [
        pb.Misdirection(
            source_node_id="a",
            expected_node_id="b",
            answered_node_id=answered,
            address="172.17.0.1",
            port=52420,
        )
        for answered in ("a", "")
    ]
    one, other = findings(PAIR, both("a", "b"), misdirections=wrong)
    assert "mac-a asks for mac-b at 172.17.0.1 port 52420, but mac-a answers." in one.text
    assert "something answers that is no node" in other.text


def test_one_way_links_name_the_missing_direction_and_the_addresses() -> None:
    found = {f.code: f for f in findings(PAIR, [link("a", "b")])}
    assert found.keys() == {"one_way", "apart"}
    assert "mac-b does not reach mac-a at any of 10.0.0.97" in found["one_way"].text
    assert found["one_way"].node_ids == ("a", "b")
    assert "firewall on mac-a" in found["one_way"].remedy
    assert "macOS" not in found["one_way"].remedy
    mac = node("b", backends=[common_pb2.BACKEND_METAL])
    assert "macOS" in findings([PAIR[0], mac], [link("a", "b")])[0].remedy


def test_groups_that_nothing_joins() -> None:
    nodes = [node(node_id) for node_id in "abcde"]
    apart = [f.text for f in findings(nodes, [*both("a", "b"), *both("b", "c"), *both("d", "e")])]
    assert apart == [
        "mac-d and mac-e are linked both ways to none of the other nodes (mac-a, mac-b and mac-c)."
    ]
    assert codes(nodes, [*both("a", "b"), *both("b", "c")]) == ["apart", "apart"]


def test_a_wire_that_is_down_while_wifi_carries_everything() -> None:
    nodes = [
        node("a", interface("en0", ETHERNET, "10.0.0.1"), interface("en1", WIFI, "10.1.0.1")),
        node("b", interface("en0", ETHERNET, "10.0.0.2"), interface("en1", WIFI, "10.1.0.2")),
    ]
    over_wifi = both("a", "b", WIFI, address="10.1.0.2", ms=4, megabytes=20)
    found = findings(nodes, over_wifi)
    assert [f.code for f in found] == ["wire_unused", "only_wifi", "only_wifi"]
    assert "at 10.0.0.1 and 10.0.0.2" in found[0].text
    assert "wifi at 10.1.0.2 (4.00 ms, 160 Mbit/s)" in found[0].text
    # With one link over the wire all is well, and without a common wire there is none to miss.
    assert codes(nodes, [*over_wifi, *both("a", "b")]) == []
    nodes[1].interfaces[0].addresses[0] = nodes[1].endpoints[0].address = "10.7.0.2"
    assert codes(nodes, over_wifi) == ["only_wifi", "only_wifi"]


def test_link_local_addresses_are_no_common_wire() -> None:
    nodes = [
        node(
            node_id,
            interface("en2", THUNDERBOLT, f"169.254.0.{number}"),
            interface("en1", WIFI, f"10.1.0.{number}"),
        )
        for number, node_id in enumerate("ab", start=1)
    ]
    assert "wire_unused" not in codes(nodes, both("a", "b", WIFI))


def test_a_node_behind_a_tunnel_only_is_wrong_and_wifi_a_note() -> None:
    over_vpn = both("a", "b", OVERLAY, ms=50, megabytes=3)
    assert {(f.code, f.note) for f in findings(PAIR, over_vpn)} >= {("only_overlay", False)}
    assert {(f.code, f.note) for f in findings(PAIR, both("a", "b", WIFI))} >= {("only_wifi", True)}


def cabled(*, links: Sequence[pb.Link], **fields: Any) -> list[Finding]:
    a = node("a", thunderbolt_ports=[port("en2", "A1", "B1"), port("en3", "A2")])
    b = node("b", thunderbolt_ports=[port("en5", "B1", "A1")])
    return findings([a, b], links, **fields)


def test_a_cable_without_a_link_is_told_once() -> None:
    found = cabled(links=both("a", "b", ms=4))
    assert [f.code for f in found] == ["cable_unused"]
    assert "joins mac-a (port en2) and mac-b, but no link runs over it from mac-a to mac-b and" in (
        found[0].text
    )
    assert "They use ethernet at 10.0.0.98 (4.00 ms, 880 Mbit/s)." in found[0].text
    over_cable = both("a", "b", THUNDERBOLT, megabytes=2_000)
    assert cabled(links=[*over_cable, *both("a", "b")]) == []
    (half,) = cabled(links=[over_cable[0], *both("a", "b")])
    assert "over it from mac-b to mac-a." in half.text


def test_links_far_below_their_kind() -> None:
    slow = [link("a", "b", THUNDERBOLT, megabytes=90), link("b", "a", megabytes=11)]
    found = findings(PAIR, slow)
    assert [(f.code, f.note) for f in found] == [("slow_link", True)] * 2
    assert "thunderbolt at 10.0.0.98 reached only 720 Mbit/s" in found[0].text


def test_speeds_that_were_never_or_not_lately_measured() -> None:
    old = both("a", "b", megabytes=None)
    assert codes(PAIR, old) == ["unmeasured", "unmeasured"]
    assert codes(PAIR, [link("a", "b"), link("b", "a", megabytes=None)]) == ["unmeasured"]
    assert measured_when(pb.Topology(links=old)) == "No link's speed was measured lately."
    assert measured_when(pb.Topology()) == ""
    some = [link("a", "b", age=12), link("b", "a", age=600), old[0]]
    assert measured_when(pb.Topology(links=some)) == (
        "Speeds were measured 12.0 s to 10 min ago, of 1 link not lately."
    )
    assert measured_when(pb.Topology(links=some[:1])) == "Speeds were measured 12.0 s ago."


def running(
    *hops: tuple[str, str], state: Any = runner_pb2.INSTANCE_STATE_READY
) -> list[runner_pb2.Instance]:
    """Return an instance on a ring; each hop is a node and the address at which it is reached."""
    ranks = [
        placement_pb2.RankAssignment(
            rank=rank,
            node_id=node_id,
            hosts=[
                "0.0.0.0:61000" if other == rank else f"{address}:61000"
                for other, (_, address) in enumerate(hops)
            ],
        )
        for rank, (node_id, _) in enumerate(hops)
    ]
    placement = placement_pb2.Placement(ranks=ranks)
    return [runner_pb2.Instance(instance_id="chat", state=state, placement=placement)]


def test_a_ring_over_a_slow_path_though_a_cable_is_there() -> None:
    vpn = both("a", "b", OVERLAY, address="100.64.0.2", ms=50, megabytes=4)
    cable = both("a", "b", THUNDERBOLT, address="169.254.0.2", megabytes=2_000)
    on_vpn = running(("a", "100.64.0.2"), ("b", "100.64.0.2"))
    found = findings(PAIR, [*vpn, *cable], instances=on_vpn)
    assert [f.code for f in found] == ["faster_path_unused"] * 2
    assert "Instance chat goes from mac-a to mac-b over overlay at 100.64.0.2" in found[0].text
    assert "thunderbolt at 169.254.0.2 (0.40 ms, 16.0 Gbit/s)" in found[0].text
    assert "shardring down chat" in found[0].remedy
    on_cable = running(("a", "169.254.0.2"), ("b", "169.254.0.2"))
    assert findings(PAIR, [*vpn, *cable], instances=on_cable) == []
    # Paths of about one speed are no reason to start anew, nor is what has ended.
    alike = both("a", "b", THUNDERBOLT, address="169.254.0.9", megabytes=2_400)
    assert findings(PAIR, [*cable, *alike], instances=on_cable) == []
    stopped = running(("a", "x"), ("b", "x"), state=runner_pb2.INSTANCE_STATE_STOPPED)
    assert findings(PAIR, both("a", "b"), instances=stopped) == []
    assert findings(PAIR, both("a", "b"), instances=running(("a", ""))) == []


def test_a_ring_over_a_path_that_is_gone() -> None:
    on_cable = running(("a", "169.254.0.2"), ("b", "169.254.0.2"))
    found = findings(PAIR, both("a", "b"), instances=on_cable)
    assert [f.code for f in found] == ["ring_on_lost_path"] * 2
    assert "at 169.254.0.2, over which no link is verified any more" in found[0].text


def bridged(node_id: str, **peers: str) -> pb.Node:
    """Return a node whose ports are all in bridge0: `bridged("a", A1="B1")`."""
    ports = [
        port(f"en{n}", own, peer, bridge="bridge0") for n, (own, peer) in enumerate(peers.items())
    ]
    return node(node_id, thunderbolt_ports=ports)


def test_bridged_ports_in_a_loop() -> None:
    two_cables = [bridged("a", A1="B1", A2="B2"), bridged("b", B1="A1", B2="A2")]
    assert bridge_loops(two_cables) == [[("a", "bridge0"), ("b", "bridge0")]]
    triangle = [
        bridged("a", A1="B1", A2="C1"),
        bridged("b", B1="A1", B2="C2"),
        bridged("c", C1="A2", C2="B2", C3="D1"),
        bridged("d", D1="C3"),
    ]
    # d hangs on the loop by one cable and is not in it.
    assert bridge_loops(triangle) == [[("a", "bridge0"), ("b", "bridge0"), ("c", "bridge0")]]
    assert bridge_loops([bridged("a", A1="A2", A2="A1")]) == [[("a", "bridge0")]]
    (found,) = findings(two_cables, both("a", "b", THUNDERBOLT, megabytes=2_000))
    assert found.code == "bridge_loop"
    assert "bridge0 on mac-a and bridge0 on mac-b" in found.text


def test_bridged_ports_without_a_loop() -> None:
    chain = [bridged("a", A1="B1"), bridged("b", B1="A1", B2="C1"), bridged("c", C1="B2")]
    assert bridge_loops(chain) == []
    two_cables = [bridged("a", A1="B1", A2="B2"), bridged("b", B1="A1", B2="A2")]
    two_cables[1].thunderbolt_ports[1].bridge = ""
    assert bridge_loops(two_cables) == []
    # The other end is no node of this cluster, or does not see the cable (any more).
    assert bridge_loops([bridged("a", A1="X1", A2="X2")]) == []
    assert bridge_loops([bridged("a", A1="B1", A2="B2"), bridged("b", B1="A1")]) == []


def test_two_loops_are_told_apart() -> None:
    pairs = [
        bridged("a", A1="B1", A2="B2"),
        bridged("b", B1="A1", B2="A2"),
        bridged("c", C1="D1", C2="D2"),
        bridged("d", D1="C1", D2="C2"),
    ]
    assert [[node_id for node_id, _ in loop] for loop in bridge_loops(pairs)] == [
        ["a", "b"],
        ["c", "d"],
    ]


@pytest.mark.parametrize(
    ("on", "generation", "bridge", "expected"),
    [
        ("ab", 5, "", []),
        ("a", 5, "", ["rdma_off"]),
        ("", 5, "", []),
        ("a", 4, "", []),
        ("ab", 5, "bridge0", ["rdma_bridged"]),
    ],
)
def test_rdma_that_could_run(on: str, generation: int, bridge: str, expected: list[str]) -> None:
    nodes = [
        node(
            own,
            rdma=pb.Rdma(enabled=own in on),
            thunderbolt_ports=[
                port("en2", own, peer, generation=generation, bridge=bridge if own == "b" else "")
            ],
        )
        for own, peer in ("ab", "ba")
    ]
    assert codes(nodes, both("a", "b", THUNDERBOLT, megabytes=2_000)) == expected


def test_the_local_network_permission_of_macos() -> None:
    def seen(**fields: Any) -> list[str]:
        probe = {"answered": False, "error": 65, "on_subnet": True, **fields}
        platform = probe.pop("platform", "darwin")
        local = LocalFacts(platform, (Probe("b", "10.0.0.98", **probe),))
        return codes(PAIR, both("a", "b"), local)

    assert seen() == ["local_network_permission", "unreachable_from_here"]
    assert seen(error=61) == ["unreachable_from_here"]
    assert seen(on_subnet=False) == ["unreachable_from_here"]
    assert seen(platform="linux") == ["unreachable_from_here"]
    assert seen(answered=True, error=None) == []


def test_a_node_is_reached_if_one_of_its_addresses_is() -> None:
    silent = Probe("b", "169.254.0.2", answered=False)
    assert codes(PAIR, both("a", "b"), LocalFacts("linux", (silent,))) == ["unreachable_from_here"]
    reached = LocalFacts("linux", (silent, Probe("b", "10.0.0.98", answered=True)))
    assert codes(PAIR, both("a", "b"), reached) == []


def test_own_networks() -> None:
    networks = own_networks()
    assert not on_own_subnet("127.0.0.1", networks)
    assert not on_own_subnet("studio.local", networks)
    assert all(on_own_subnet(str(network.network_address), networks) for network in networks)


def test_findings_stand_with_their_remedy_and_what_is_wrong_comes_first() -> None:
    found = findings(PAIR, [link("a", "b", megabytes=None)])
    assert [f.note for f in found] == sorted(f.note for f in found)
    assert not healthy(found)
    lines = shown(findings_list(found, verdict(found, 2, 1)))
    assert lines[0].startswith("wrong mac-a reaches mac-b")
    assert lines[1].startswith("      Look for a firewall")
    assert any(line.startswith("note  mac-a has measured") for line in lines)
    assert lines[-1] == "2 nodes, 1 link: 2 things wrong."
