"""Hostile messages to every call of services and node: each is answered or refused in words.

A seeded loop, so that a failure repeats. A refusal has a documented reason under its code; never
INTERNAL or UNKNOWN, never silence, and the process lives on without a line of error in its log.
"""

import asyncio
import contextlib
import random
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import httpx2
import psutil
import pytest
import pytest_asyncio
from google.protobuf.descriptor import FieldDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from smg_grpc_proto import mlx_engine_pb2

from services.cli.lab import Lab
from services.common.addresses import HostPort, parse_host_port
from services.common.channel import Remote
from services.common.errors import Reason
from services.common.server import Limits
from services.common.status import CODES, DOMAIN, STATUS_DETAILS_KEY
from shardring.downloads.v1 import downloads_service_pb2
from shardring.placement.v1 import placement_service_pb2
from shardring.runner.v1 import instance_service_pb2, shard_service_pb2
from shardring.topology.v1 import node_identity_service_pb2, topology_service_pb2

pytestmark = pytest.mark.asyncio(loop_scope="module")

# Of each process, the services with calls of our own.
SERVICES: dict[str, list[ServiceDescriptor]] = {
    "topology": [topology_service_pb2.DESCRIPTOR.services_by_name["TopologyService"]],
    "downloads": [downloads_service_pb2.DESCRIPTOR.services_by_name["DownloadsService"]],
    "placement": [placement_service_pb2.DESCRIPTOR.services_by_name["PlacementService"]],
    "ada": [
        node_identity_service_pb2.DESCRIPTOR.services_by_name["NodeIdentityService"],
        instance_service_pb2.DESCRIPTOR.services_by_name["InstanceService"],
        shard_service_pb2.DESCRIPTOR.services_by_name["ShardService"],
        mlx_engine_pb2.DESCRIPTOR.services_by_name["MlxEngine"],
    ],
}
METHODS = [
    (name, service, method.name)
    for name, services in SERVICES.items()
    for service in services
    for method in service.methods
]
MESSAGES_EACH = 250
# A node's calls have fewer fields, and there are many of them.
NODE_MESSAGES_EACH = 60
ANSWER_SECONDS = 1.0
# What a call may take beyond its own deadline before it counts as hung.
GRACE_SECONDS = 5.0
MOST_GROWTH_BYTES = 300 * 2**20

# Plausible values by field name, so that messages get past the first check.
PLAUSIBLE = {
    "node_id": ("n1", "n2"),
    "source_node_id": ("n1",),
    "sink_node_id": ("n2",),
    "model_id": ("org/name",),
    "revision": ("main", "0" * 40),
    "commit": ("0" * 40,),
    "address": ("10.0.0.1", "fe80::1", "host.example"),
    "addresses": ("10.0.0.1", "fe80::1%eth0"),
    "sink_address": ("10.0.0.1",),
    "port": (1, 65535),
    "name": ("studio",),
    "page_size": (0, 1),
    "min_node_count": (0, 1, 3),
    "seconds": (1, 1_700_000_000),
    "nanos": (0, 999_999_999),
    "download_id": ("d-1",),
    "file_names": ("config.json", "a/b.safetensors"),
    "whole_files": ("config.json",),
    "max_count": (1, 64),
    "hub_port": (0, 52430),
    "command_id": ("c-1",),
    "memory_total_bytes": (2**34,),
    "memory_available_bytes": (2**33,),
}
STRINGS = (
    "",
    "..",
    "../../etc/passwd",
    "/etc/passwd",
    "a/../../b",
    "org/name\x00",
    "a\nb\r\n\x1b[31m",
    "\u202eeman/gro",
    "orɡ/nаme",  # noqa: RUF001 - look-alikes are the point
    "models--a--b",
    "%00%2e%2e%2f",
    "C:\\x",
    "{}[]'\"`$(x)",
    "😀" * 300,
    "é" * 5_000,
    "x" * 200_000,
    "::1%" + "z" * 50_000,
    "2001:db8::1%\n\x1b[2J",
    "nan~x",
    "-inf~",
    "YXQ6LTE=",
    "=",
)
BYTES = (b"", b"\xff" * 10, b"x" * 100_000)
BOUNDS = {
    FieldDescriptor.TYPE_INT32: (-(2**31), -1, 0, 1, 2**31 - 1),
    FieldDescriptor.TYPE_INT64: (-(2**63), -1, 0, 1, 2**63 - 1),
    FieldDescriptor.TYPE_ENUM: (-(2**31), -1, 0, 1, 5, 99, 2**31 - 1),
    FieldDescriptor.TYPE_DOUBLE: (float("nan"), float("inf"), -1.0, 0.0, 1e308),
    FieldDescriptor.TYPE_FLOAT: (float("nan"), float("inf"), -1.0, 0.0, 1e38),
    FieldDescriptor.TYPE_UINT32: (0, 1, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 1, 2**64 - 1),
    FieldDescriptor.TYPE_BOOL: (False, True),
    FieldDescriptor.TYPE_STRING: STRINGS,
    FieldDescriptor.TYPE_BYTES: BYTES,
}


Fields = list[tuple[Message, Any]]


def plausible(message: Message, rng: random.Random, seen: Fields) -> Message:
    """Fill a message with values that make sense; note each field that holds a value in `seen`."""
    oneofs: Any = message.DESCRIPTOR.oneofs
    chosen = {rng.choice(oneof.fields).name for oneof in oneofs}
    for field in message.DESCRIPTOR.fields:
        if field.containing_oneof and field.name not in chosen:
            continue
        if field.message_type and field.message_type.GetOptions().map_entry:
            held, named = (field.message_type.fields_by_name[of].type for of in ("value", "key"))
            value = "value" if held == FieldDescriptor.TYPE_STRING else rng.choice(BOUNDS[held])
            getattr(message, field.name)["key" if named == FieldDescriptor.TYPE_STRING else 1] = (
                value
            )
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            inner = getattr(message, field.name)
            plausible(inner.add() if field.is_repeated else inner, rng, seen)
            if not field.is_repeated:
                inner.SetInParent()
            seen.append((message, field))
        else:
            value = rng.choice(PLAUSIBLE.get(field.name) or BOUNDS[field.type][:1])
            if field.is_repeated:
                getattr(message, field.name).append(value)
            else:
                setattr(message, field.name, value)
            seen.append((message, field))
    return message


def spoil(message: Message, field: Any, rng: random.Random) -> None:
    """Give one field a value that makes no sense, or take it away."""
    if field.is_repeated and rng.random() < 0.3:
        values = getattr(message, field.name)
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            for _ in range(rng.choice((1, 10_000))):
                values.add().CopyFrom(values[0])
        elif field.type == FieldDescriptor.TYPE_STRING:
            values.extend(f"id-{i}" for i in range(10_000))
        else:
            values.extend([values[0]] * 10_000)
    elif field.type == FieldDescriptor.TYPE_MESSAGE or rng.random() < 0.05:
        message.ClearField(field.name)
    elif field.is_repeated:
        getattr(message, field.name).append(rng.choice(BOUNDS[field.type]))
    else:
        setattr(message, field.name, rng.choice(BOUNDS[field.type]))


def hostile(message: Message, rng: random.Random) -> Message:
    """Fill a message with sense and spoil a field of it, or several."""
    seen: Fields = []
    plausible(message, rng, seen)
    for spoilt, field in rng.choices(seen, k=rng.choice((1, 1, 1, 4))) if seen else ():
        spoil(spoilt, field, rng)
    return message


def check_refusal(error: grpc.aio.AioRpcError, words: str) -> None:
    """Assert that an error is one of ours: a documented reason under the code of the table."""
    # Told by the client's own clock where the service has nobody to ask.
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and STATUS_DETAILS_KEY not in dict(
        error.trailing_metadata()
    ):
        return
    assert error.code() not in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN), (error, words)
    packed = dict(error.trailing_metadata()).get(STATUS_DETAILS_KEY)
    assert isinstance(packed, bytes), (error, words)
    info = error_details_pb2.ErrorInfo()
    assert status_pb2.Status.FromString(packed).details[0].Unpack(info)
    assert info.domain == DOMAIN
    assert CODES[Reason[info.reason]] is error.code()
    said = error.details()
    assert said, "a refusal says something"
    assert said.isprintable(), f"{words}: it may steer a terminal"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lab(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Lab]:
    """The three services, a node, and a hub with nothing in it."""
    folder = tmp_path_factory.mktemp("lab")
    (folder / "models").mkdir()
    lab = Lab(folder)
    try:
        await lab.start_control(folder / "models", heartbeat_seconds=20)
        await lab.start_node("ada", environment={"SHARDRING_CALIBRATE": "0"})
        yield lab
    finally:
        await lab.stop()


@asynccontextmanager
async def watched(lab: Lab, name: str) -> AsyncIterator[Remote]:
    """A channel to a service that afterwards must live, remember little and have logged no error"""
    process = psutil.Process(lab.processes[name].pid)
    before = process.memory_info().rss
    remote = Remote(name, [lab.address(name)])
    try:
        yield remote
    finally:
        await remote.close()
    assert process.is_running()
    assert process.status() != psutil.STATUS_ZOMBIE
    assert process.memory_info().rss - before < MOST_GROWTH_BYTES
    words = lab.processes[name].log.read_text()
    assert "Traceback" not in words, words[-3000:]
    assert " ERROR " not in words, words[-3000:]


@pytest.mark.parametrize(
    ("name", "service", "method"),
    METHODS,
    ids=[
        method if name != "ada" else f"{service.name}-{method}" for name, service, method in METHODS
    ],
)
async def test_whatever_is_sent_is_answered_or_refused_in_words(
    lab: Lab, name: str, service: ServiceDescriptor, method: str
) -> None:
    rng = random.Random(f"{name} {method}")
    async with watched(lab, name) as remote:
        ask = asking(remote, service, method)
        for round_number in range(NODE_MESSAGES_EACH if name == "ada" else MESSAGES_EACH):
            async with asyncio.timeout(ANSWER_SECONDS + GRACE_SECONDS):
                try:
                    await ask(rng)
                except grpc.aio.AioRpcError as error:
                    check_refusal(error, f"message {round_number}")


def asking(
    remote: Remote, service: ServiceDescriptor, method: str
) -> Callable[[random.Random], Any]:
    """Return a coroutine function that makes one call and takes its first answers."""
    descriptor = service.methods_by_name[method]
    channel: Any = remote.channel
    path = f"/{service.full_name}/{method}"
    request_class = GetMessageClass(descriptor.input_type)
    response_class = GetMessageClass(descriptor.output_type)
    coding: dict[str, Any] = {
        "request_serializer": request_class.SerializeToString,
        "response_deserializer": response_class.FromString,
    }

    async def unary(rng: random.Random) -> None:
        message = hostile(request_class(), rng)
        await channel.unary_unary(path, **coding)(message, timeout=ANSWER_SECONDS)

    async def streaming(rng: random.Random) -> None:
        message = hostile(request_class(), rng)
        call = channel.unary_stream(path, **coding)(message, timeout=ANSWER_SECONDS)
        await call.read()
        call.cancel()

    async def both(rng: random.Random) -> None:
        requests = iter([hostile(request_class(), rng) for _ in range(4)])
        call = channel.stream_stream(path, **coding)(requests, timeout=ANSWER_SECONDS)
        try:
            async for _ in call:
                pass
        except grpc.aio.AioRpcError as error:
            # The client's own word for a message that the server no longer waited for.
            if error.details() != "Internal error from Core":
                raise

    if descriptor.client_streaming:
        return both
    return streaming if descriptor.server_streaming else unary


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """Return an HTTP/2 frame."""
    return len(payload).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + payload


def literal(name: str, value: str) -> bytes:
    """Return a header as HPACK writes one that is in no table."""
    return b"".join([b"\0", *(bytes([len(t)]) + t.encode() for t in (name, value))])


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = frame(4, 0, 0, b"")
# Its reader has no room: whatever is sent to it stays with the sender.
NO_WINDOW = frame(4, 0, 0, b"\0\4\0\0\0\0")
WATCH = b"".join(
    literal(name, value)
    for name, value in (
        (":method", "POST"),
        (":scheme", "http"),
        (":path", "/grpc.health.v1.Health/Watch"),
        (":authority", "x"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    )
)
# What each of many clients says, before it says nothing any more.
SAID = {
    "nothing": b"",
    "half a preface": PREFACE[:10],
    "garbage": random.Random("garbage").randbytes(5_000),
    "HTTP/1": b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 100_000,
    "a TLS hello": bytes.fromhex("16030100c8010000c40303") + bytes(50),
    "the start of a frame that is too large": PREFACE + SETTINGS + b"\xff\xff\xff\0\0\0\0\0\1" * 3,
    "headers that are none": PREFACE + SETTINGS + frame(1, 5, 1, b"\xff" * 100),
    "headers without an end": PREFACE + SETTINGS + frame(1, 0, 1, WATCH),
    "frames of no known kind": PREFACE + SETTINGS + frame(99, 0, 0, b"x" * 1_000) * 50,
    "calls that it does not read": PREFACE
    + NO_WINDOW
    + b"".join(
        frame(1, 4, stream, WATCH) + frame(0, 1, stream, bytes(5)) for stream in range(1, 99, 2)
    ),
    "calls that it takes back": PREFACE
    + SETTINGS
    + b"".join(
        frame(1, 4, stream, WATCH) + frame(3, 0, stream, b"\0\0\0\x08")
        for stream in range(1, 2_001, 2)
    ),
}
OF_EACH = 8


async def said(address: HostPort, words: bytes, half_open: bool) -> asyncio.StreamWriter:
    """Connect, say something, and stay; half open: with nothing more to come."""
    _, writer = await asyncio.open_connection(address.host, address.port)
    # The other end may have hung up: that is its right.
    with contextlib.suppress(OSError):
        writer.write(words)
        if half_open:
            writer.write_eof()
    return writer


def node_hub(lab: Lab) -> HostPort:
    """Return where the node serves its cache folder, as its log says."""
    words = lab.processes["ada"].log.read_text()
    found = re.search(r"Serving the cache folder to other nodes on (\S+)", words)
    assert found is not None
    return parse_host_port(found[1])


@pytest.mark.parametrize("name", ["topology", "downloads", "placement", "ada", "hub", "ada's hub"])
async def test_clients_without_sense_cost_the_others_nothing(lab: Lab, name: str) -> None:
    process = lab.processes[name.removesuffix("'s hub")]
    address = node_hub(lab) if name == "ada's hub" else process.address
    files = psutil.Process(process.pid)
    before = files.num_fds()
    async with watched(lab, process.name):
        writers = await asyncio.gather(
            *(
                said(address, words, half_open)
                for words in SAID.values()
                for half_open in (False, True)
                for _ in range(OF_EACH)
            )
        )
        try:
            # Sooner than the servers hang up on the others.
            async with asyncio.timeout(Limits().handshake_seconds - 1):
                await answered(address, by_http="hub" in name)
        finally:
            for writer in writers:
                writer.transport.abort()
        async with asyncio.timeout(3 * GRACE_SECONDS):
            # Some may be those of calls made meanwhile: they are fewer than ours were.
            while files.num_fds() > before + OF_EACH:
                await asyncio.sleep(0.05)


async def answered(address: HostPort, *, by_http: bool) -> None:
    """Ask as somebody with sense does, on a new connection, and require an answer."""
    if by_http:
        async with httpx2.AsyncClient(trust_env=False, timeout=None) as client:
            answer = await client.get(f"http://{address}/api/models/no/model")
        assert answer.status_code == 404
        return
    remote = Remote("it", [address])
    check: Any = health_pb2_grpc.HealthStub(remote.channel).Check  # type: ignore[attr-defined]
    try:
        await remote.unary(
            check, health_pb2.HealthCheckRequest(), timeout=Limits().handshake_seconds
        )
    finally:
        await remote.close()
