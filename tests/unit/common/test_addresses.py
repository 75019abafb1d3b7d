"""Which addresses can be dialled."""

import pytest

from services.common.addresses import HostPort, check_reachable
from services.common.errors import Reason, ShardringError


@pytest.mark.parametrize(
    "host", ["192.0.2.1", "2001:db8::1", "fe80::1%en0", "localhost", "studio-1.local", "a.b."]
)
def test_an_address_or_a_name_can_be_dialled(host: str) -> None:
    check_reachable("endpoint", HostPort(host, 52420))


@pytest.mark.parametrize(
    "host",
    ["", " ", "a b", "a/b", "unix:/tmp/x", "[::1]", "1.2.3.4,5.6.7.8", "-a", "é", "a\n"],
)
def test_anything_else_cannot(host: str) -> None:
    with pytest.raises(ShardringError) as refusal:
        check_reachable("endpoint", HostPort(host, 52420))
    assert refusal.value.reason is Reason.INVALID_FIELD
    assert refusal.value.metadata["field"] == "endpoint.address"


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_a_port_is_1_to_65535(port: int) -> None:
    with pytest.raises(ShardringError) as refusal:
        check_reachable("endpoint", HostPort("192.0.2.1", port))
    assert refusal.value.metadata["field"] == "endpoint.port"
