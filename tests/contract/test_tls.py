"""Who is spoken to over TLS, and who is refused, in words that can be acted on."""

import asyncio
import itertools
import os
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import click
import grpc
import httpx2
import pytest
from click.testing import CliRunner
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.cli.main import cli
from services.common.access import CHANGING, Caller, check_caller
from services.common.addresses import HostPort
from services.common.channel import Remote
from services.common.errors import Reason, ShardringError
from services.common.security import Security, ServerOptions, security_of
from services.common.server import ListenError, Server, start_server
from services.common.status import error_from_rpc
from services.common.tls import Tls, node_host, node_uri
from services.downloads.app import Downloads
from services.downloads.fleet import Fleet
from services.downloads.hub import HubServer, hub_app
from services.downloads.rpc import registration
from services.downloads.rpc.servicer import DownloadsServicer
from services.downloads.watchers import Watchers
from services.downloads.worker.fetch import neighbour_tls
from services.topology.agent.bursts import BurstGate
from services.topology.agent.identify import identify
from services.topology.agent.prober import Prober
from services.topology.agent.probing import Answered, AnsweredByOther, Target
from services.topology.agent.rpc import identity_registration
from services.topology.app import TopologyApp
from services.topology.rpc.servicer import topology_registration
from shardring.downloads.v1 import downloads_service_pb2
from shardring.downloads.v1.downloads_service_pb2_grpc import DownloadsServiceStub
from shardring.placement.v1 import placement_service_pb2
from shardring.runner.v1 import instance_service_pb2, shard_service_pb2
from shardring.topology.v1 import (
    node_identity_service_pb2,
    topology_pb2,
    topology_service_pb2,
)
from shardring.topology.v1.topology_service_pb2_grpc import TopologyServiceStub
from tests.tls_files import Files, secured

A, B, C = ("a" * 32, "b" * 32, "c" * 32)
PLAIN = Security()
LOOPBACK = HostPort("127.0.0.1", 0)

# Calls that tell and change nothing: open to every certificate of the CA. Asking an instance for
# an answer is what clients are for. Whoever adds a call says here or in CHANGING what it is.
OPEN = {
    "shardring.topology.v1.TopologyService": {"GetTopology", "WatchTopology"},
    "shardring.topology.v1.NodeIdentityService": {"Identify", "MeasureLink"},
    "shardring.downloads.v1.DownloadsService": {
        "GetDownload",
        "ListDownloads",
        "GetFractions",
        "WatchDownloads",
        "GetModel",
        "ListModels",
    },
    "shardring.placement.v1.PlacementService": {"Place", "PreviewPlacements"},
    "shardring.runner.v1.InstanceService": {
        "GetInstance",
        "ListInstances",
        "WatchInstance",
        "Generate",
    },
    "shardring.runner.v1.ShardService": {"WatchShard"},
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files.made(tmp_path_factory.mktemp("pki"))


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Another cluster's."""
    return Files.made(tmp_path_factory.mktemp("others"))


def trusting(tls: Tls, ca: Tls) -> Tls:
    """Return one side's files, but trusting another's CA."""
    return Tls(tls.cert, tls.key, ca.ca)


@asynccontextmanager
async def serving(security: Security, *registrations: Any) -> AsyncIterator[Server]:
    server = await start_server(LOOPBACK, registrations, security=security)
    try:
        yield server
    finally:
        await server.stop()


async def asked(server: Server, security: Security, node_id: str = "") -> None:
    """Make a call that every server answers; raise what `Remote` does."""
    address = HostPort("127.0.0.1", server.port)
    remote = Remote("something", [address], node_id=node_id, security=security)
    try:
        check: Any = health_pb2_grpc.HealthStub(remote.channel).Check  # type: ignore[attr-defined]
        await remote.unary(check, health_pb2.HealthCheckRequest(), timeout=10)
    finally:
        await remote.close()


async def refusal(server: Server, security: Security, node_id: str = "") -> ShardringError:
    with pytest.raises(ShardringError) as refused:
        await asked(server, security, node_id)
    return refused.value


async def test_both_ends_of_one_ca_understand_each_other(files: Files) -> None:
    async with serving(secured(files.issue("control"))) as server:
        await asked(server, secured(files.issue("anna", client=True)))
        await asked(server, secured(files.issue("ada", node_id=A)))
    async with serving(secured(files.issue("ada", node_id=A))) as server:
        await asked(server, secured(files.issue("anna", client=True)), A)


async def test_a_caller_without_tls_is_told_to_use_it(files: Files) -> None:
    async with serving(secured(files.issue("control"))) as server:
        error = await refusal(server, PLAIN)
    assert error.reason is Reason.SERVICE_UNAVAILABLE
    assert "it wants TLS, and this side has none. Give --tls-cert" in error.message


async def test_a_server_without_tls_is_told_of(files: Files) -> None:
    async with serving(PLAIN) as server:
        error = await refusal(server, secured(files.issue("anna", client=True)))
    assert error.reason is Reason.SERVICE_UNAVAILABLE
    assert "it answers without TLS, and this side wants TLS" in error.message


async def test_a_server_of_another_ca_is_not_spoken_to(files: Files, others: Files) -> None:
    anna = files.issue("anna", client=True)
    async with serving(secured(trusting(others.issue("control"), anna))) as server:
        error = await refusal(server, secured(anna))
    assert "its certificate was not issued by the CA of --tls-ca" in error.message


async def test_a_caller_of_another_ca_is_refused(files: Files, others: Files) -> None:
    control = files.issue("control")
    async with serving(secured(control)) as server:
        stranger = trusting(others.issue("anna", client=True), control)
        error = await refusal(server, secured(stranger))
    assert "certificate" in error.message
    assert "another CA" in error.message or "does not know the CA" in error.message


async def test_a_caller_without_a_certificate_is_refused(files: Files) -> None:
    control = files.issue("control")
    async with serving(secured(control)) as server:
        credentials = grpc.ssl_channel_credentials(control.ca.read_bytes())
        address = f"127.0.0.1:{server.port}"
        async with grpc.aio.secure_channel(address, credentials) as channel:
            check: Any = health_pb2_grpc.HealthStub(channel).Check  # type: ignore[attr-defined]
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await check(health_pb2.HealthCheckRequest(), timeout=10)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_an_expired_certificate_is_refused_at_both_ends(files: Files) -> None:
    anna = files.issue("anna", client=True)
    expired = files.expired("old", A)
    with pytest.raises(ShardringError, match=r"expired on .* Issue a new one"):
        security_of(ServerOptions(str(expired.cert), str(expired.key), str(expired.ca)))
    # One that expired while its process ran.
    async with serving(secured(expired)) as server:
        error = await refusal(server, secured(anna), A)
        assert "its certificate has expired" in error.message
    async with serving(secured(files.issue("control"))) as server:
        error = await refusal(server, secured(expired))
        assert "expired" in error.message


async def test_a_client_cannot_serve(files: Files) -> None:
    async with serving(secured(files.issue("mallory", client=True))) as server:
        error = await refusal(server, secured(files.issue("anna", client=True)))
    assert error.reason is Reason.SERVICE_UNAVAILABLE


async def test_a_server_has_to_prove_its_address(files: Files) -> None:
    """Its name is what was dialled; a node's certificate names loopback, and here it is not."""
    ada = secured(files.issue("ada", node_id=A))
    server = await start_server(HostPort("127.0.0.2", 0), [], security=ada)
    address = HostPort("127.0.0.2", server.port)
    remote = Remote("x", [address], security=secured(files.issue("anna", client=True)))
    try:
        check: Any = health_pb2_grpc.HealthStub(remote.channel).Check  # type: ignore[attr-defined]
        with pytest.raises(ShardringError, match="does not name this address"):
            await remote.unary(check, health_pb2.HealthCheckRequest(), timeout=10)
    finally:
        await remote.close()
        await server.stop()


async def test_another_node_than_the_one_meant_is_not_spoken_to(files: Files) -> None:
    async with serving(
        secured(files.issue("bob", node_id=B)), identity_registration(A)
    ) as server:  # it claims to be A, and is B
        address = HostPort("127.0.0.1", server.port)
        remote = Remote("x", [address], node_id=A, security=secured(files.issue("c", node_id=C)))
        try:
            with pytest.raises(ShardringError) as refused:
                await identify(remote, timeout=10)
        finally:
            await remote.close()
    assert refused.value.reason is Reason.WRONG_NODE
    assert refused.value.metadata == {"expected_node_id": A, "node_id": B}
    assert f"node {B} answers, not node {A}" in refused.value.message


async def test_a_probe_takes_the_certificates_word_not_the_answers(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.common.security._current", secured(files.issue("cyd", node_id=C)))
    probing = Prober(
        C, lab=True, gate=BurstGate(C), on_change=lambda: None, on_figures=lambda: None
    )
    async with serving(secured(files.issue("bob", node_id=B)), identity_registration(A)) as server:
        target = Target(A, HostPort("127.0.0.1", server.port))
        assert await probing._probe(target) == AnsweredByOther(B)
    # Something of the cluster that is no node, and claims to be the one that is asked for.
    async with serving(secured(files.issue("control")), identity_registration(A)) as server:
        target = Target(A, HostPort("127.0.0.1", server.port))
        assert await probing._probe(target) == AnsweredByOther("")
    async with serving(secured(files.issue("ada", node_id=A)), identity_registration(A)) as server:
        target = Target(A, HostPort("127.0.0.1", server.port))
        assert isinstance(await probing._probe(target), Answered)
        await asyncio.gather(*(remote.close() for remote in probing._remotes.values()))


@asynccontextmanager
async def topology(files: Files, *allowed: str) -> AsyncIterator[Server]:
    app = TopologyApp(heartbeat_seconds=1, lab=True)
    security = secured(files.issue("control"), *allowed)
    try:
        async with serving(security, topology_registration(app)) as server:
            yield server
    finally:
        app.close()


def report(node_id: str) -> topology_service_pb2.ReportNodeRequest:
    node = topology_pb2.Node(node_id=node_id, name="x", memory_total_bytes=1)
    return topology_service_pb2.ReportNodeRequest(node=node)


async def test_a_node_speaks_for_itself_only(files: Files) -> None:
    async with topology(files) as server:
        address = HostPort("127.0.0.1", server.port)
        for who, mine in (
            (files.issue("ada", node_id=A), True),
            (files.issue("bob", node_id=B), False),
            (files.issue("anna", client=True), False),
        ):
            remote = Remote("topology", [address], security=secured(who))
            stub: Any = TopologyServiceStub(remote.channel)
            links = topology_service_pb2.ReportLinksRequest(source_node_id=A)
            refusals = []
            for call, request in ((stub.ReportNode, report(A)), (stub.ReportLinks, links)):
                try:
                    await remote.unary(call, request, timeout=10)
                except ShardringError as error:
                    refusals.append(error)
            await remote.close()
            reasons = {error.reason for error in refusals}
            # What is its own is looked at further, and lacks this and that.
            assert (Reason.NODE_NOT_PROVEN not in reasons) is mine, refusals
            if not mine:
                assert len(refusals) == 2
                assert refusals[0].metadata["node_id"] == A
                assert "names" in refusals[0].message


async def test_a_worker_attaches_for_its_own_node_only(files: Files) -> None:
    watchers = Watchers()
    fleet = Fleet(watchers)
    servicer = DownloadsServicer(Downloads(fleet, watchers), fleet)
    hello = downloads_service_pb2.AttachWorkerRequest(
        hello=downloads_service_pb2.WorkerHello(node_id=A)
    )

    async def attach(tls: Tls) -> None:
        """Attach as A with this certificate; raise what the service says."""
        address = HostPort("127.0.0.1", server.port)
        remote = Remote("downloads", [address], security=secured(tls))
        call = DownloadsServiceStub(remote.channel).AttachWorker(timeout=10)
        try:
            await call.write(hello)
            async with asyncio.timeout(10):
                while A not in fleet.nodes:
                    if call.done():
                        await call.read()
                    await asyncio.sleep(0.01)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, service="downloads", address=remote.address) from error
        finally:
            call.cancel()
            await remote.close()

    async with serving(secured(files.issue("control")), registration(servicer)) as server:
        for name, node_id in (("bob", B), ("anna", "")):
            tls = files.issue(name, node_id=node_id, client=not node_id)
            with pytest.raises(ShardringError) as refused:
                await attach(tls)
            assert refused.value.reason is Reason.NODE_NOT_PROVEN
            assert refused.value.metadata["certificate_node_id"] == node_id
        await attach(files.issue("ada", node_id=A))
        servicer.end_sessions()
    fleet.close()
    watchers.close()


ADA = Caller(("ada", "CN=ada", node_uri(A)), (A,))
ANNA = Caller(("anna", "CN=anna", "shardring://client/anna"), ())


@pytest.mark.parametrize("path", CHANGING)
def test_each_call_is_for_whom_the_table_says(path: str) -> None:
    """Tried with every kind of caller, with and without --allow."""
    rule = CHANGING[path]
    for caller, allowed, node_id in itertools.product(
        (ADA, ANNA), (frozenset[str](), frozenset({"anna"}), frozenset({"olga"})), (A, B, "")
    ):
        may = (
            bool(rule.own and caller is ADA and node_id == A)
            or bool(rule.nodes and caller is ADA)
            or (rule.clients and (not allowed or (caller is ANNA and "anna" in allowed)))
        )
        if may:
            check_caller(caller, rule, allowed, "Call", node_id)
            continue
        with pytest.raises(ShardringError) as refused:
            check_caller(caller, rule, allowed, "Call", node_id)
        expected = Reason.CALLER_NOT_ALLOWED if rule.clients else Reason.NODE_NOT_PROVEN
        assert refused.value.reason is expected


async def test_who_may_change_something_can_be_limited(files: Files) -> None:
    remove = topology_service_pb2.RemoveNodeRequest(node_id=A)
    async with topology(files, "anna", "shardring://client/olga") as server:
        address = HostPort("127.0.0.1", server.port)
        outcomes = {}
        for name in ("anna", "olga", "guest"):
            tls = files.issue(name, client=True)
            remote = Remote("topology", [address], security=secured(tls))
            stub = TopologyServiceStub(remote.channel)
            # To look is everybody's.
            await remote.unary(
                stub.GetTopology, topology_service_pb2.GetTopologyRequest(), timeout=10
            )
            with pytest.raises(ShardringError) as refused:
                await remote.unary(stub.RemoveNode, remove, timeout=10)
            outcomes[name] = refused.value
            await remote.close()
    assert outcomes["anna"].reason is Reason.NODE_NOT_FOUND
    assert outcomes["olga"].reason is Reason.NODE_NOT_FOUND
    assert outcomes["guest"].reason is Reason.CALLER_NOT_ALLOWED
    assert outcomes["guest"].metadata == {"caller": "guest", "method": "RemoveNode"}
    assert "--allow" in outcomes["guest"].message


def test_of_every_call_it_is_said_whether_it_changes_something() -> None:
    modules = (
        topology_service_pb2,
        node_identity_service_pb2,
        downloads_service_pb2,
        placement_service_pb2,
        instance_service_pb2,
        shard_service_pb2,
    )
    calls = {
        f"/{service.full_name}/{method.name}"
        for module in modules
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    opened = {f"/{service}/{method}" for service, methods in OPEN.items() for method in methods}
    assert not opened & CHANGING.keys()
    assert opened | CHANGING.keys() == calls


async def test_a_renewed_certificate_is_taken_up_without_a_restart(
    files: Files, others: Files, tmp_path: Path
) -> None:
    anna = secured(files.issue("anna", client=True))
    served = Tls(*(tmp_path / name for name in ("cert", "key", "ca")))

    def put(source: Tls) -> None:
        for name in ("cert", "key", "ca"):
            getattr(served, name).write_bytes(getattr(source, name).read_bytes())

    put(files.issue("ada", node_id=A))
    hub = HubServer(hub_app(tmp_path / "none"), LOOPBACK, security=secured(served))
    hub_port = (await hub.start()).port
    try:
        async with serving(secured(served)) as server:
            await asked(server, anna, A)
            put(files.issue("bob", node_id=B))
            # Its size may be as before: the time it was written is not.
            os.utime(served.cert, ns=(1, 1))
            await asked(server, anna, B)
            served.cert.write_text("half a cert")
            await asked(server, anna, B)
        anna_tls = anna.tls
        assert anna_tls is not None
        put(files.issue("bob", node_id=B))
        async with httpx2.AsyncClient(verify=anna_tls.client_context()) as client:
            answer = await client.get(
                f"https://127.0.0.1:{hub_port}/x", extensions={"sni_hostname": node_host(B)}
            )
        assert answer.status_code == 404
    finally:
        await hub.stop()


async def test_a_hub_of_a_node_is_for_the_cluster_only(files: Files, tmp_path: Path) -> None:
    ada, anna = files.issue("ada", node_id=A), files.issue("anna", client=True)
    hub = HubServer(hub_app(tmp_path / "none"), LOOPBACK, security=secured(ada))
    address = await hub.start()
    url = f"https://{address}/api/models/org/name"
    stranger = ssl.create_default_context(cafile=anna.ca)
    known = neighbour_tls([str(anna.cert), str(anna.key), str(anna.ca)])
    try:
        async with httpx2.AsyncClient(trust_env=False) as client:
            with pytest.raises(httpx2.TransportError):
                await client.get(f"http://{address}/api/models/org/name")
        async with httpx2.AsyncClient(verify=stranger) as client:
            with pytest.raises(httpx2.TransportError):
                await client.get(url)
        async with httpx2.AsyncClient(verify=known) as client:
            answer = await client.get(url, extensions={"sni_hostname": node_host(A)})
            assert answer.status_code == 404
        async with httpx2.AsyncClient(verify=known) as client:
            with pytest.raises(httpx2.ConnectError):
                await client.get(url, extensions={"sni_hostname": node_host(B)})
    finally:
        await hub.stop()


async def test_garbage_costs_a_server_with_tls_nothing(files: Files) -> None:
    """Nor do clients that say nothing, or the half of a hello."""
    hello = bytes.fromhex("16030100c8010000c40303")
    anna = secured(files.issue("anna", client=True))
    async with serving(secured(files.issue("control"))) as server:
        writers = []
        for words in (b"", hello, b"\xff" * 5_000, b"GET / HTTP/1.1\r\n\r\n") * 16:
            _, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(words)
            writers.append(writer)
        await asked(server, anna)
        for writer in writers:
            writer.transport.abort()
        await asked(server, anna)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "studio-1"])
async def test_beyond_loopback_without_tls_takes_a_word(host: str, tmp_path: Path) -> None:
    for start in (
        start_server(HostPort(host, 0), [], security=PLAIN),
        HubServer(hub_app(tmp_path), HostPort(host, 0), security=PLAIN).start(),
    ):
        with pytest.raises(ListenError, match="--insecure"):
            await start


COMMANDS = (
    ("serve", "topology"),
    ("serve", "placement"),
    ("serve", "downloads"),
    ("serve", "hub", "."),
    ("node",),
)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_that_listens_takes_that_word(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    data = {"SHARDRING_DATA_DIR": str(tmp_path), "SHARDRING_JOIN": "127.0.0.1"}
    ended = CliRunner(env=data).invoke(cli, [*command, "--listen", "0.0.0.0:0"])
    assert ended.exit_code == 1
    assert "--insecure" in ended.stderr


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_what_nobody_told_where_to_listen_is_on_loopback(command: tuple[str, ...]) -> None:
    found: click.Command = cli
    for word in command:
        if isinstance(found, click.Group):
            inner = found.get_command(click.Context(found), word)
            assert inner is not None
            found = inner
    (default,) = (option.default for option in found.params if option.name == "listen")
    assert str(default).startswith("127.0.0.1:")


async def test_said_it_is_done(files: Files) -> None:
    for security in (Security(insecure=True), secured(files.issue("control"))):
        server = await start_server(HostPort("0.0.0.0", 0), [], security=security)
        await asked(server, security if security.tls else PLAIN)
        await server.stop()
