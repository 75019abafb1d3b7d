"""`shardring doctor`."""

import asyncio
import dataclasses

import click

from services.cli.census import take_census
from services.cli.doctor.findings import Finding, View
from services.cli.doctor.local import local_facts
from services.cli.doctor.paths import measured_when
from services.cli.doctor.rules import diagnose, local_network
from services.cli.render.doctor import findings_list, healthy, verdict
from services.cli.shell import Shell, client_command
from services.common.addresses import HostPort
from services.common.errors import ShardringError
from shardring.topology.v1 import topology_pb2


@client_command
async def doctor(shell: Shell) -> None:
    """Say what is wrong with this cluster's network, in plain words, and what to do about it.

    Looks at what the nodes have found and at what this machine reaches itself; run it on the
    machine that has the trouble. Ends with 0 when nothing is wrong, else with 1.
    """
    try:
        topology = await shell.cluster.topology()
    except ShardringError:
        # The one thing that is seen without a topology: macOS keeps this program off the network.
        local = await local_facts([("", shell.cluster.topology_address)])
        barred = list(local_network(View(topology_pb2.Topology(), local)))
        if not barred:
            raise
        _show(shell, barred, topology_pb2.Topology())
        raise click.exceptions.Exit(1) from None
    targets = [
        (node.node_id, HostPort(endpoint.address, endpoint.port))
        for node in topology.nodes
        for endpoint in node.endpoints
    ]
    local, census = await asyncio.gather(local_facts(targets), take_census(shell.cluster))
    findings = diagnose(View(topology, local, census.instances))
    _show(shell, findings, topology)
    if not healthy(findings):
        raise click.exceptions.Exit(1)


def _show(shell: Shell, findings: list[Finding], topology: topology_pb2.Topology) -> None:
    if shell.json:
        shell.print_document(
            {
                "healthy": healthy(findings),
                "node_count": len(topology.nodes),
                "link_count": len(topology.links),
                "findings": [dataclasses.asdict(finding) for finding in findings],
            }
        )
        return
    summary = verdict(findings, len(topology.nodes), len(topology.links))
    shell.out.print(findings_list(findings, f"{summary} {measured_when(topology)}".strip()))
