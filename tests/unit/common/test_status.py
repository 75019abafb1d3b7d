"""Errors survive the way over the wire, and every reason is documented and mapped."""

import urllib.parse

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc.aio import AioRpcError, Metadata

from services.common.errors import Reason, ShardringError
from services.common.status import (
    CODES,
    error_from_proto,
    error_from_rpc,
    error_message,
    error_to_proto,
    error_to_trailers,
)
from shardring.common.v1.error_reason_pb2 import ErrorReason


def rpc_error(code: grpc.StatusCode, *trailers: tuple[str, str | bytes]) -> AioRpcError:
    return AioRpcError(code, Metadata(), Metadata(*trailers), details="no route")


def test_reasons_are_those_of_the_proto() -> None:
    documented = {name.removeprefix("ERROR_REASON_") for name in ErrorReason.keys()}
    assert documented - {"UNSPECIFIED"} == {reason.value for reason in Reason}


def test_every_reason_has_a_code() -> None:
    assert set(CODES) == set(Reason)


def test_an_error_survives_the_wire() -> None:
    sent = ShardringError(
        Reason.QUEUE_FULL,
        "64 requests wait already.",
        metadata={"queued_count": 64},
        retry_delay_seconds=1.5,
    )
    error = rpc_error(CODES[sent.reason], *error_to_trailers(sent))
    got = error_from_rpc(error, service="runner", address="127.0.0.1:1")
    assert (got.reason, got.message) == (Reason.QUEUE_FULL, "64 requests wait already.")
    assert got.metadata == {"queued_count": "64"}
    assert got.retry_delay_seconds == 1.5


def test_an_error_survives_as_data() -> None:
    sent = ShardringError(Reason.DISK_FULL, "Full.", metadata={"needed_bytes": 7})
    proto = error_to_proto(sent)
    assert proto.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
    got = error_from_proto(proto)
    assert (got.reason, got.message, got.metadata) == (
        Reason.DISK_FULL,
        "Full.",
        {"needed_bytes": "7"},
    )


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (grpc.StatusCode.UNAVAILABLE, Reason.SERVICE_UNAVAILABLE),
        (grpc.StatusCode.DEADLINE_EXCEEDED, Reason.SERVICE_TIMEOUT),
        (grpc.StatusCode.UNIMPLEMENTED, Reason.INTERNAL),
    ],
)
def test_an_unreachable_service_is_named(code: grpc.StatusCode, reason: Reason) -> None:
    got = error_from_rpc(rpc_error(code), service="topology", address="10.0.0.1:52410")
    assert got.reason is reason
    assert got.metadata == {"service": "topology", "address": "10.0.0.1:52410"}
    assert "topology at 10.0.0.1:52410" in got.message


def test_an_error_fits_its_trailers_and_steers_no_terminal() -> None:
    """gRPC drops what is over 8 KiB, and counts other than ASCII in the message threefold."""
    for piece in ("x", "é", "\U0001f600", "\x1b[2J\n"):
        error = ShardringError(
            Reason.INVALID_FIELD,
            piece * 100_000,
            metadata={f"key-{i}": piece * 100_000 for i in range(100)},
        )
        [(_, packed), *_] = error_to_trailers(error)
        quoted = urllib.parse.quote(error_message(error))
        assert len(packed) + len(quoted) < 8_000
        assert error_message(error).isprintable()
        info = error_details_pb2.ErrorInfo()
        assert status_pb2.Status.FromString(packed).details[0].Unpack(info)
        assert info.metadata["key-0"].startswith(piece)
