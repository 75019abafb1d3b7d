"""Fingerprints, RDMA, Thunderbolt ports and conflicts on the wire, and the bad ones refused."""

from dataclasses import replace

import pytest

from services.common.errors import Reason, ShardringError
from services.topology.domain import rules
from services.topology.domain.model import (
    IdentityConflict,
    Node,
    Rdma,
    RdmaDevice,
    ThunderboltPort,
)
from services.topology.rpc.convert import node_from_proto, node_to_proto
from services.topology.rpc.convert_hardware import conflict_from_proto, conflict_to_proto
from tests.unit.topology.examples import node

PORT = ThunderboltPort("en2", "817DCFA4", ("28CA4C30",), 80 * 10**9, 5, "bridge0")
GOOD = node(
    fingerprint="0f" * 16,
    rdma=Rdma(True, (RdmaDevice("rdma_en2", "en2"), RdmaDevice("mlx5_0"))),
    thunderbolt_ports=(PORT, ThunderboltPort("", "57AE1A4C")),
)


def test_good_reports_pass_and_survive_the_wire() -> None:
    rules.check_node(GOOD)
    assert node_from_proto(node_to_proto(GOOD)) == GOOD
    conflict = IdentityConflict("a", "studio-1 (10.0.0.4:1)", "studio-2 (10.0.0.5:1)")
    assert conflict_from_proto(conflict_to_proto(conflict)) == conflict


def with_port(**fields: object) -> Node:
    return replace(GOOD, thunderbolt_ports=(replace(PORT, **fields),))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        (replace(GOOD, fingerprint="a" * 65), "node.machine_fingerprint"),
        (replace(GOOD, fingerprint="a b"), "node.machine_fingerprint"),
        (replace(GOOD, fingerprint="a\n"), "node.machine_fingerprint"),
        (replace(GOOD, rdma=Rdma(True, (RdmaDevice(""),))), "node.rdma.devices[0].name"),
        (replace(GOOD, rdma=Rdma(True, (RdmaDevice("é"),))), "node.rdma.devices[0].name"),
        (
            replace(GOOD, rdma=Rdma(True, (RdmaDevice("r", "e" * 65),))),
            "node.rdma.devices[0].interface_name",
        ),
        (replace(GOOD, rdma=Rdma(True, (RdmaDevice("r"),) * 65)), "node.rdma.devices"),
        (replace(GOOD, thunderbolt_ports=(PORT,) * 65), "node.thunderbolt_ports"),
        (with_port(interface="a b"), "node.thunderbolt_ports[0].interface_name"),
        (with_port(domain="a" * 65), "node.thunderbolt_ports[0].domain_id"),
        (with_port(bridge="\0"), "node.thunderbolt_ports[0].bridge"),
        (with_port(peer_domains=("a",) * 17), "node.thunderbolt_ports[0].peer_domain_ids"),
        (with_port(peer_domains=("a b",)), "node.thunderbolt_ports[0].peer_domain_ids"),
        (with_port(link_bits_per_second=-1), "node.thunderbolt_ports[0].link_bits_per_second"),
        (with_port(link_bits_per_second=2**60), "node.thunderbolt_ports[0].link_bits_per_second"),
        (with_port(generation=-1), "node.thunderbolt_ports[0].generation"),
        (with_port(generation=101), "node.thunderbolt_ports[0].generation"),
    ],
)
def test_bad_reports_are_refused_with_the_field(bad: Node, field: str) -> None:
    with pytest.raises(ShardringError) as caught:
        rules.check_node(bad)
    assert caught.value.reason is Reason.INVALID_FIELD
    assert caught.value.metadata["field"] == field
