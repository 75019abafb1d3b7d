"""Rules about speed: slow paths that are used, and fast ones that are not."""

import ipaddress
from collections.abc import Callable, Iterator
from itertools import combinations

from services.cli.doctor.findings import Finding, View, cost_seconds, path
from services.cli.render.nodes import kind_name
from services.cli.text import count, duration, listed, speed
from services.common.addresses import parse_host_port
from shardring.runner.v1 import runner_pb2
from shardring.topology.v1 import topology_pb2

_SLOW_KINDS = frozenset({topology_pb2.INTERFACE_KIND_WIFI, topology_pb2.INTERFACE_KIND_OVERLAY})
_WIRED_KINDS = frozenset(
    {
        topology_pb2.INTERFACE_KIND_THUNDERBOLT,
        topology_pb2.INTERFACE_KIND_ETHERNET,
        topology_pb2.INTERFACE_KIND_MAYBE_ETHERNET,
    }
)
# Below this a path of its kind is slower than it should be, in bytes a second.
_LEAST = {
    topology_pb2.INTERFACE_KIND_THUNDERBOLT: 250_000_000,
    topology_pb2.INTERFACE_KIND_ETHERNET: 20_000_000,
    topology_pb2.INTERFACE_KIND_MAYBE_ETHERNET: 20_000_000,
}
# A path is faster when it takes this part of the time, and at least so much less.
_FASTER_FACTOR = 0.5
_FASTER_SECONDS = 0.000_5


def cable_without_link(view: View) -> Iterator[Finding]:
    """A Thunderbolt cable between two nodes over which no link runs."""
    told = set()
    ports = {p.domain_id: n.node_id for n in view.topology.nodes for p in n.thunderbolt_ports}
    for node in view.topology.nodes:
        for port in node.thunderbolt_ports:
            for peer in port.peer_domain_ids:
                other = ports.get(peer)
                pair = tuple(sorted((node.node_id, other or "")))
                if other is None or other == node.node_id or pair in told:
                    continue
                told.add(pair)
                lacking = [
                    f"from {view.label(source)} to {view.label(sink)}"
                    for source, sink in ((node.node_id, other), (other, node.node_id))
                    if not _linked_by_thunderbolt(view, source, sink)
                ]
                if not lacking:
                    continue
                yield Finding(
                    "cable_unused",
                    f"A Thunderbolt cable joins {view.label(node.node_id)} (port "
                    f"{port.interface_name or port.domain_id}) and {view.label(other)}, but no "
                    f"link runs over it {listed(lacking)}. {_instead(view, node.node_id, other)}",
                    "Check that the port has an address at both ends and is switched on (System "
                    "Settings, Network), that no firewall bars it, and that both nodes listen on "
                    "it (--listen 0.0.0.0:52420).",
                    (node.node_id, other),
                )


def wired_but_slow(view: View) -> Iterator[Finding]:
    """Two nodes joined by Wi-Fi or a tunnel only, though both are on one wired network."""
    for one, other in combinations(sorted(view.nodes), 2):
        links = [*view.links.get((one, other), ()), *view.links.get((other, one), ())]
        if not links or any(link.kind not in _SLOW_KINDS for link in links):
            continue
        shared = _shared_wire(view.nodes[one], view.nodes[other])
        if shared is None:
            continue
        near, far = shared
        yield Finding(
            "wire_unused",
            f"{view.label(one)} and {view.label(other)} reach each other by "
            f"{listed(sorted({kind_name(link.kind) for link in links}))} only, although both seem "
            f"to be on one wired network, at {near} and {far}. {_instead(view, one, other)}",
            f"Check the cable between them, and whether {near} answers from {far}.",
            (one, other),
        )


def only_slow_links(view: View) -> Iterator[Finding]:
    """Nodes whose links all run over Wi-Fi or tunnels."""
    for node_id in sorted(view.nodes):
        kinds = {link.kind for link in view.topology.links if link.sink_node_id == node_id}
        if not kinds or kinds - _SLOW_KINDS:
            continue
        tunnels = kinds == {topology_pb2.INTERFACE_KIND_OVERLAY}
        names = listed(sorted(kind_name(kind) for kind in kinds))
        yield Finding(
            "only_overlay" if tunnels else "only_wifi",
            f"{view.label(node_id)} is reached by {names} only: rings with it will be slow.",
            "Join it by Ethernet or Thunderbolt.",
            (node_id,),
            note=not tunnels,
        )


def below_its_kind(view: View) -> Iterator[Finding]:
    """Links that are much slower than what they run over."""
    for link in view.topology.links:
        least = _LEAST.get(link.kind)
        measured = link.HasField("throughput_bytes_per_second")
        if least and measured and link.throughput_bytes_per_second < least:
            yield Finding(
                "slow_link",
                f"From {view.label(link.source_node_id)} to {view.label(link.sink_node_id)}, "
                f"{kind_name(link.kind)} at {link.sink_address} reached only "
                f"{speed(link.throughput_bytes_per_second)}.",
                "Check cable, adapter and switch; something else may have used the link just then.",
                (link.source_node_id, link.sink_node_id),
                note=True,
            )


def ring_on_slow_path(view: View) -> Iterator[Finding]:
    """Running instances whose ring uses a slow path, or one that is gone."""
    for instance in view.instances:
        ranks = instance.placement.ranks
        if instance.state != runner_pb2.INSTANCE_STATE_READY or len(ranks) < 2:
            continue
        for rank in ranks:
            after = ranks[(rank.rank + 1) % len(ranks)]
            address = parse_host_port(rank.hosts[after.rank]).host
            pair = (rank.node_id, after.node_id)
            used = next((x for x in view.links.get(pair, ()) if x.sink_address == address), None)
            best = view.best(*pair)
            what = (
                f"Instance {instance.instance_id} goes from {view.label(pair[0])} to "
                f"{view.label(pair[1])}"
            )
            again = f"Stop it and start it again: shardring down {instance.instance_id}"
            if used is None:
                yield Finding(
                    "ring_on_lost_path",
                    f"{what} at {address}, over which no link is verified any more.",
                    again,
                    pair,
                )
            elif best is not None and _faster(best, used):
                yield Finding(
                    "faster_path_unused",
                    f"{what} over {path(used)}, though there is a faster path: {path(best)}.",
                    again,
                    pair,
                )


def unmeasured(view: View) -> Iterator[Finding]:
    """Nodes none of whose links has a speed that was measured lately."""
    for node_id in sorted(view.nodes):
        own = [link for link in view.topology.links if link.source_node_id == node_id]
        if own and not any(link.HasField("throughput_bytes_per_second") for link in own):
            yield Finding(
                "unmeasured",
                f"{view.label(node_id)} has measured the speed of none of its links lately; rings "
                "go by round trips and kinds there.",
                "It measures when links are new and while nothing generates; look again in a few "
                "minutes.",
                (node_id,),
                note=True,
            )


def measured_when(topology: topology_pb2.Topology) -> str:
    """Return when speeds were last measured, over all links: the newest and the oldest figure."""
    ages = sorted(
        link.throughput_age.ToNanoseconds() / 1e9
        for link in topology.links
        if link.HasField("throughput_bytes_per_second")
    )
    missing = len(topology.links) - len(ages)
    if not ages:
        return "No link's speed was measured lately." if topology.links else ""
    when = (
        f"Speeds were measured {duration(ages[0])} to {duration(ages[-1])} ago"
        if ages[-1] - ages[0] >= 1
        else f"Speeds were measured {duration(ages[0])} ago"
    )
    return f"{when}, of {count(missing, 'link')} not lately." if missing else f"{when}."


def _faster(best: topology_pb2.Link, used: topology_pb2.Link) -> bool:
    fast, slow = cost_seconds(best), cost_seconds(used)
    return fast < slow * _FASTER_FACTOR and slow - fast > _FASTER_SECONDS


def _instead(view: View, one: str, other: str) -> str:
    best = view.best(one, other) or view.best(other, one)
    return f"They use {path(best)}." if best else "They are not linked at all."


def _linked_by_thunderbolt(view: View, source: str, sink: str) -> bool:
    kinds = {link.kind for link in view.links.get((source, sink), ())}
    return topology_pb2.INTERFACE_KIND_THUNDERBOLT in kinds


def _shared_wire(one: topology_pb2.Node, other: topology_pb2.Node) -> tuple[str, str] | None:
    """Return addresses of the two that seem to be on one wired network.

    Nodes do not tell the sizes of their networks; the usual ones are assumed: /24, and /64 for
    IPv6. Link-local addresses are the same everywhere and tell nothing.
    """
    for near in _wired(one):
        for far in _wired(other):
            if near != far and _network(near) == _network(far) is not None:
                return near, far
    return None


def _wired(node: topology_pb2.Node) -> Iterator[str]:
    advertised = {endpoint.address for endpoint in node.endpoints}
    for interface in node.interfaces:
        if interface.kind in _WIRED_KINDS:
            yield from (address for address in interface.addresses if address in advertised)


def _network(text: str) -> object:
    address = ipaddress.ip_address(text)
    if address.is_link_local or address.is_loopback:
        return None
    prefix = 24 if address.version == 4 else 64
    return ipaddress.ip_network((address, prefix), strict=False)


PATH_RULES: tuple[Callable[[View], Iterator[Finding]], ...] = (
    cable_without_link,
    ring_on_slow_path,
    wired_but_slow,
    only_slow_links,
    below_its_kind,
    unmeasured,
)
