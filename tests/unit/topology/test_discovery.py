"""What is said of a cluster on the LAN, and which of several is meant."""

import pytest

from services.common.errors import Reason, ShardringError
from services.topology.bootstrap import TopologyOptions, advert_of
from services.topology.discovery.advert import (
    Advert,
    advert_from_txt,
    advert_to_txt,
    check_cluster_name,
    chosen,
)
from services.topology.discovery.mdns import instance_name
from services.topology.domain.model import Interface, InterfaceKind

RED = Advert("studio-1 red 52410", "red", ("10.0.0.4", "fd00::4"), 52410, 52411, 52412)
BLUE = Advert("studio-2 blue 6000", "blue", ("10.0.0.5",), 6000, 6001, 6002)
RED_TOO = Advert("studio-3 red 52410", "red", ("10.0.0.6",), 52410, 52411, 52412)


def test_an_advert_survives_the_wire() -> None:
    assert advert_from_txt(BLUE.instance, BLUE.hosts, 6000, advert_to_txt(BLUE)) == BLUE
    # DNS gives the addresses in any order; the best one comes first again.
    assert advert_from_txt(RED.instance, RED.hosts[::-1], 52410, advert_to_txt(RED)) == RED


@pytest.mark.parametrize(
    ("hosts", "port", "changes"),
    [
        ((), 52410, {}),
        (("10.0.0.4",), 0, {}),
        (("10.0.0.4",), 52410, {"cluster": ""}),
        (("10.0.0.4",), 52410, {"cluster": "a\nb"}),
        (("10.0.0.4",), 52410, {"placement": "many"}),
        (("10.0.0.4",), 52410, {"downloads": "70000"}),
        (("10.0.0.4",), 52410, {"downloads": "\u0665"}),
    ],
)
def test_what_is_not_rightly_ours_is_passed_over(
    hosts: tuple[str, ...], port: int, changes: dict[str, str]
) -> None:
    assert advert_from_txt("x", hosts, port, {**advert_to_txt(RED), **changes}) is None
    assert advert_from_txt("x", hosts, port, {}) is None


def test_the_only_cluster_or_that_of_the_name_is_chosen() -> None:
    assert chosen([RED], "") == RED
    assert chosen([RED, BLUE], "blue") == BLUE


@pytest.mark.parametrize(
    ("found", "name", "reason", "listed"),
    [
        ([RED, BLUE], "", Reason.CLUSTER_AMBIGUOUS, "blue at 10.0.0.5:6000, red at 10.0.0.4:52410"),
        (
            [RED, RED_TOO, BLUE],
            "red",
            Reason.CLUSTER_AMBIGUOUS,
            "red at 10.0.0.4:52410, red at 10.0.0.6:52410",
        ),
        ([BLUE], "red", Reason.CLUSTER_NOT_FOUND, "blue at 10.0.0.5:6000"),
        ([], "", Reason.CLUSTER_NOT_FOUND, ""),
        ([], "red", Reason.CLUSTER_NOT_FOUND, ""),
    ],
)
def test_what_cannot_be_chosen_is_refused_with_what_was_found(
    found: list[Advert], name: str, reason: Reason, listed: str
) -> None:
    with pytest.raises(ShardringError) as caught:
        chosen(found, name)
    assert caught.value.reason is reason
    assert caught.value.metadata == {"cluster_name": name, "found": listed}
    assert listed in caught.value.message


@pytest.mark.parametrize("bad", ["", "a b", "a" * 64, "rot\n", "grün"])
def test_names_that_are_none(bad: str) -> None:
    with pytest.raises(ShardringError):
        check_cluster_name(bad)


def test_instances_have_names_that_dns_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "h" * 100 + ".example")
    assert len(instance_name("c" * 63, 65535).encode()) <= 63


@pytest.mark.parametrize(
    ("listen", "lab", "hosts"),
    [
        ("0.0.0.0", False, ("10.0.0.4", "172.17.0.1")),
        ("10.0.0.4", False, ("10.0.0.4",)),
        ("127.0.0.1", False, None),
        ("0.0.0.0", True, None),
        ("no-such-name.invalid", False, None),
    ],
)
def test_what_a_topology_service_says_of_itself(
    listen: str, lab: bool, hosts: tuple[str, ...] | None
) -> None:
    interfaces = [
        Interface("docker0", InterfaceKind.VIRTUAL, ("172.17.0.1",)),
        Interface("eth0", InterfaceKind.ETHERNET, ("10.0.0.4",)),
        Interface("lo", InterfaceKind.VIRTUAL, ("127.0.0.1", "::1")),
    ]
    options = TopologyOptions(cluster_name="red", lab=lab, placement_port=7, downloads_port=8)
    advert = advert_of(options, listen, 52410, interfaces)
    assert (advert and advert.hosts) == hosts
    if advert:
        assert (advert.cluster_name, advert.placement_port, advert.downloads_port) == ("red", 7, 8)
