"""Which networks rings are made of."""

from dataclasses import replace

import pytest

from services.cli.node import ring_networks
from services.common.addresses import HostPort
from services.common.errors import Reason, ShardringError
from services.topology.agent.probing import Target, retargeted
from tests.unit.topology.examples import node

OWN = node("a", "10.0.0.1")
PEER = replace(
    node("b", "10.0.0.2"),
    endpoints=tuple(HostPort(host, 7) for host in ("10.0.0.2", "10.9.0.2", "fd00::2")),
)


@pytest.mark.parametrize(
    ("networks", "hosts"),
    [
        ((), ["10.0.0.2", "10.9.0.2", "fd00::2"]),
        (("10.9.0.0/24",), ["10.9.0.2"]),
        (("10.9.0.0/24", "fd00::/64"), ["10.9.0.2", "fd00::2"]),
        (("192.168.0.0/16",), []),
    ],
)
def test_only_addresses_in_them_are_probed(networks: tuple[str, ...], hosts: list[str]) -> None:
    table = retargeted({}, OWN, [PEER], 0, lab=False, networks=ring_networks(networks))
    assert list(table) == [Target("b", HostPort(host, 7)) for host in hosts]


@pytest.mark.parametrize("text", ["", "10.9.0.1/24", "10.9.0.0/33", "ring"])
def test_what_is_no_network_is_refused(text: str) -> None:
    with pytest.raises(ShardringError) as refused:
        ring_networks([text])
    assert refused.value.reason is Reason.INVALID_FIELD
