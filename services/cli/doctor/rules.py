"""The rules of `shardring doctor`: each says in plain words what it finds in a topology."""

import errno
from collections.abc import Callable, Iterator
from itertools import combinations

from services.cli.doctor.bridges import bridge_loops
from services.cli.doctor.findings import Finding, View, path
from services.cli.doctor.paths import PATH_RULES
from services.cli.text import listed
from shardring.common.v1 import common_pb2
from shardring.topology.v1 import topology_pb2

# What macOS answers where a program may not use the local network.
_MACOS_NO_ROUTE = 65

Rule = Callable[[View], Iterator[Finding]]


def diagnose(view: View) -> list[Finding]:
    """Return all findings: what is wrong first, then what is worth knowing."""
    found = [finding for rule in RULES for finding in rule(view)]
    return sorted(found, key=lambda finding: finding.note)


def nothing_there(view: View) -> Iterator[Finding]:
    """No node, or a picture that is not complete yet."""
    if view.topology.gathering:
        yield Finding(
            "gathering",
            "The topology service has just started; nodes and links may still be missing.",
            "Look again in ten seconds.",
            note=True,
        )
    elif not view.nodes:
        yield Finding("no_nodes", "No node is alive.", "Start one with: shardring node")


def duplicate_ids(view: View) -> Iterator[Finding]:
    """Two machines with one node id."""
    for conflict in view.topology.identity_conflicts:
        yield Finding(
            "duplicate_id",
            f"Two machines have the node id {view.names.short_id(conflict.node_id)}: "
            f"{conflict.held_by} is in the cluster, {conflict.claimed_by} is refused.",
            "If one disk was cloned from the other, delete the file node-id in the data folder of "
            "one of them and restart its node.",
            (conflict.node_id,),
        )


def misdirected(view: View) -> Iterator[Finding]:
    """Addresses where another node answers than the one that advertises them."""
    for wrong in view.topology.misdirections:
        answered = (
            f"{view.label(wrong.answered_node_id)} answers"
            if wrong.answered_node_id
            else "something answers that is no node of this cluster"
        )
        yield Finding(
            "misdirected_address",
            f"{view.label(wrong.source_node_id)} asks for {view.label(wrong.expected_node_id)} at "
            f"{wrong.address} port {wrong.port}, but {answered}.",
            "Two machines have this address, or a port is forwarded. No link uses it; give one of "
            "them another address, or let the node listen on one address only (--listen).",
            (wrong.source_node_id, wrong.expected_node_id),
        )


def one_way(view: View) -> Iterator[Finding]:
    """Pairs that are linked in one direction only."""
    for source, sink in sorted(view.links):
        if (sink, source) in view.links:
            continue
        addresses = listed(list(_addresses(view.nodes.get(source))))
        deaf = view.nodes.get(sink)
        remedy = (
            f"Look for a firewall on {view.label(source)} that keeps connections out, or for a "
            f"missing route on {view.label(sink)}."
        )
        if deaf is not None and common_pb2.BACKEND_METAL in deaf.backends:
            remedy += (
                f" Where {view.label(sink)} reaches nobody, macOS may keep its node off the local "
                "network: run shardring doctor there, the way the node is run."
            )
        yield Finding(
            "one_way",
            f"{view.label(source)} reaches {view.label(sink)} (over "
            f"{path(min(view.links[source, sink], key=lambda link: link.sink_address))}), but "
            f"{view.label(sink)} does not reach {view.label(source)} at any of {addresses}. No "
            "ring can join them.",
            remedy,
            (source, sink),
        )


def apart(view: View) -> Iterator[Finding]:
    """Nodes, or groups of nodes, that no two-way link joins to the others."""
    if len(view.nodes) < 2 or view.topology.gathering:
        return
    groups: list[set[str]] = [{node_id} for node_id in sorted(view.nodes)]
    for one, other in combinations(sorted(view.nodes), 2):
        if view.both_ways(one, other):
            joined = [group for group in groups if one in group or other in group]
            groups = [group for group in groups if group not in joined]
            groups.append(set().union(*joined))
    if len(groups) < 2:
        return
    groups.sort(key=lambda group: (-len(group), sorted(map(view.label, group))))
    for group in groups[1:]:
        names = listed(sorted(map(view.label, group)))
        yield Finding(
            "apart",
            f"{names} {'is' if len(group) == 1 else 'are'} linked both ways to none of the other "
            f"nodes ({listed(sorted(map(view.label, set(view.nodes) - group)))}).",
            "Check cable, network and firewall. A node that listens on 127.0.0.1 is reached by its "
            "own machine only: start it with --listen 0.0.0.0:52420.",
            tuple(sorted(group)),
        )


def bridged_loops(view: View) -> Iterator[Finding]:
    """Thunderbolt ports that are bridged in a loop."""
    for loop in bridge_loops(view.topology.nodes):
        bridges = listed([f"{bridge} on {view.label(node_id)}" for node_id, bridge in loop])
        yield Finding(
            "bridge_loop",
            f"Bridged Thunderbolt ports form a loop through {bridges}. Frames may go round in it "
            "without end, which slows every machine in it down.",
            "Delete the Thunderbolt Bridge of one of them (System Settings, Network) and give its "
            "ports addresses of their own, or unplug one cable.",
            tuple(sorted({node_id for node_id, _ in loop})),
        )


def half_rdma(view: View) -> Iterator[Finding]:
    """Thunderbolt 5 cables over which RDMA could run, and does not."""
    ports = {
        port.domain_id: (node.node_id, port)
        for node in view.topology.nodes
        for port in node.thunderbolt_ports
        if port.domain_id
    }
    for domain, (node_id, port) in sorted(ports.items()):
        for peer in port.peer_domain_ids:
            if peer not in ports or not domain < peer or port.generation < 5:
                continue
            ends = (node_id, ports[peer][0])
            on = [end for end in ends if view.nodes[end].rdma.enabled]
            off = [end for end in ends if end not in on]
            if len(on) == 1:
                yield Finding(
                    "rdma_off",
                    f"A Thunderbolt 5 cable joins {view.label(ends[0])} and "
                    f"{view.label(ends[1])}, but RDMA is on at {view.label(on[0])} only.",
                    f"Run `rdma_ctl enable` in the recovery system of {view.label(off[0])}.",
                    ends,
                    note=True,
                )
            bridged = [e for e, p in zip(ends, (port, ports[peer][1]), strict=True) if p.bridge]
            if len(on) == 2 and bridged:
                yield Finding(
                    "rdma_bridged",
                    f"The Thunderbolt port that joins {view.label(ends[0])} and "
                    f"{view.label(ends[1])} is in a bridge on "
                    f"{listed([view.label(end) for end in bridged])}: RDMA cannot use it.",
                    "Take the port out of the Thunderbolt Bridge.",
                    ends,
                    note=True,
                )


def local_network(view: View) -> Iterator[Finding]:
    """macOS does not let this program use the local network."""
    if view.local.platform != "darwin":
        return
    barred = [p for p in view.local.probes if p.error == _MACOS_NO_ROUTE and p.on_subnet]
    if barred:
        yield Finding(
            "local_network_permission",
            f'macOS answers "no route to host" (65) for {listed([p.address for p in barred])}, '
            "although this machine is in the same network: the program that runs shardring may "
            "not use the local network.",
            "Open System Settings, Privacy & Security, Local Network, and switch on the terminal "
            "or program that shardring runs in. Then start it again. If it is not listed, restart "
            "the Mac and try once more, so that macOS asks.",
            tuple(sorted({probe.node_id for probe in barred if probe.node_id})),
        )


def unreachable_from_here(view: View) -> Iterator[Finding]:
    """Nodes that this machine reaches at none of their addresses."""
    probed = {probe.node_id for probe in view.local.probes if probe.node_id}
    reached = {probe.node_id for probe in view.local.probes if probe.answered}
    for node_id in sorted(probed - reached):
        tried = [probe for probe in view.local.probes if probe.node_id == node_id]
        seen = sorted({_why(probe.error) for probe in tried})
        yield Finding(
            "unreachable_from_here",
            f"This machine reaches {view.label(node_id)} at none of its addresses "
            f"({listed([probe.address for probe in tried])}): {listed(seen)}.",
            "Commands that talk to the node, such as run and generate, will not work from here. "
            "Check firewall and network between the two.",
            (node_id,),
        )


def _why(error: int | None) -> str:
    return "no answer" if error is None else errno.errorcode.get(error, str(error))


def _addresses(node: topology_pb2.Node | None) -> Iterator[str]:
    for endpoint in node.endpoints if node else ():
        yield endpoint.address


RULES: tuple[Rule, ...] = (
    nothing_there,
    duplicate_ids,
    local_network,
    unreachable_from_here,
    misdirected,
    one_way,
    apart,
    bridged_loops,
    *PATH_RULES,
    half_rdma,
)
