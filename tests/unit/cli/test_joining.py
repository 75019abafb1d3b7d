"""Where the cluster is: in which order the ways to know it count."""

import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from services.cli import joining
from services.cli.client import ClientOptions, located
from services.cli.joining import Services, found, others_addresses, told
from services.cli.node import NodeOptions, named_services
from services.common.addresses import HostPort
from services.common.errors import Reason, ShardringError
from services.topology.discovery.advert import Advert


@pytest.fixture
def listener() -> Iterator[HostPort]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield HostPort("127.0.0.1", server.getsockname()[1])


@pytest.fixture(autouse=True)
def nothing_local(monkeypatch: pytest.MonkeyPatch) -> None:
    """No topology service runs on this machine's usual port, whatever else is tested here."""
    monkeypatch.setattr(joining, "TOPOLOGY_PORT", 1)
    # Loopback stands for other machines here.
    monkeypatch.setattr(joining, "own_addresses", set)


def on_lan(*adverts: Advert) -> joining.Browse:
    async def browse() -> Sequence[Advert]:
        return adverts

    return browse


def advert(address: HostPort, *others: str, name: str = "red") -> Advert:
    return Advert(f"x {name}", name, (*others, address.host), address.port, 52411, 52412)


def test_what_is_told_comes_from_the_option_or_else_from_the_file(tmp_path: Path) -> None:
    assert told("", str(tmp_path)) is None
    (tmp_path / "join").write_text("\n# the studio in the corner\nstudio-1\nignored\n")
    by_file = told("", str(tmp_path))
    assert by_file is not None
    assert by_file.topology.host == by_file.downloads.host == "studio-1"
    assert str(tmp_path / "join") in by_file.source
    by_option = told("[fd00::7]:6000", str(tmp_path))
    assert by_option is not None
    assert by_option.topology == HostPort("fd00::7", 6000)
    assert by_option.downloads == HostPort("fd00::7", 52412)
    (tmp_path / "join").write_text("# nothing yet\n")
    assert told("", str(tmp_path)) is None
    with pytest.raises(ShardringError):
        told("studio:many", str(tmp_path))


async def test_the_lan_is_asked_last_and_an_address_that_answers_is_taken(
    listener: HostPort,
) -> None:
    # The first address is one that refuses.
    services = await found("", on_lan(advert(listener, "127.0.0.9")))
    assert services.topology == listener
    assert services.placement == HostPort("127.0.0.1", 52411)
    assert services.source == "cluster red on the LAN"


async def test_a_service_on_this_machine_is_taken_unless_a_name_is_asked_for(
    listener: HostPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "TOPOLOGY_PORT", listener.port)
    assert (await found("", on_lan())).source == "on this machine"
    with pytest.raises(ShardringError) as caught:
        await found("red", on_lan())
    assert caught.value.reason is Reason.CLUSTER_NOT_FOUND


async def test_a_cluster_whose_addresses_are_all_silent_is_named(listener: HostPort) -> None:
    silent = advert(HostPort("127.0.0.1", 1))
    with pytest.raises(ShardringError) as caught:
        await found("", on_lan(silent))
    assert caught.value.reason is Reason.SERVICE_UNAVAILABLE
    assert "Cluster red" in caught.value.message
    assert (await found("blue", on_lan(silent, advert(listener, name="blue")))).topology == listener


def test_an_address_of_this_machine_leads_to_no_other() -> None:
    own = {"172.17.0.1", "10.0.0.4"}
    assert others_addresses(["172.17.0.1", "10.0.0.5"], own) == ["10.0.0.5"]
    assert others_addresses(["172.17.0.1", "10.0.0.4"], own) == ["172.17.0.1", "10.0.0.4"]


async def test_without_a_network_nothing_is_found() -> None:
    async def broken() -> Sequence[Advert]:
        raise OSError("no network")

    with pytest.raises(ShardringError) as caught:
        await found("", broken)
    assert caught.value.reason is Reason.CLUSTER_NOT_FOUND


async def test_a_client_that_is_told_looks_for_nothing(tmp_path: Path) -> None:
    for options in (ClientOptions(cluster="x"), ClientOptions(topology="127.0.0.1:7")):
        assert await located(options) == options
    (tmp_path / "join").write_text("studio-1:6000\n")
    options = await located(ClientOptions(data_dir=str(tmp_path), downloads="other:7"))
    assert (options.topology, options.downloads) == ("studio-1:6000", "other:7")


@pytest.mark.parametrize(
    ("options", "topology", "downloads"),
    [
        ({}, None, None),
        ({"join": "s"}, "s:52410", "s:52412"),
        ({"join": "s:6000"}, "s:6000", "s:52412"),
        ({"topology": "t:1"}, "t:1", "t:52412"),
        ({"join": "s", "topology": "t:1"}, "t:1", "s:52412"),
        ({"topology": "t:1", "downloads": "d:2"}, "t:1", "d:2"),
        ({"downloads": "d:2"}, None, "d:2"),
    ],
)
def test_what_a_node_is_told(
    options: dict[str, Any],
    topology: str | None,
    downloads: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()  # the real port
    named = named_services(NodeOptions(data_dir=str(tmp_path), **options))
    assert [address and str(address) for address in named] == [topology, downloads]


def test_services_of_one_host() -> None:
    assert Services.at("h", "x", 5).placement == HostPort("h", 52411)
