"""Errors on the wire: the one table from reasons to gRPC codes, and the way back."""

import logging

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc.aio import AioRpcError

from services.common.errors import Reason, ShardringError
from services.common.handshake import told
from shardring.common.v1 import common_pb2

logger = logging.getLogger(__name__)

DOMAIN = "shardring"
STATUS_DETAILS_KEY = "grpc-status-details-bin"
# gRPC may drop a call whose trailers are over 8 KiB; the message stands in them twice.
MOST_MESSAGE_BYTES = 1_500
MOST_METADATA_BYTES = 4_000
MOST_VALUE_BYTES = 1_000
# An answer is not a broken connection: tells gRPC's own retries not to ask again.
NO_RETRY = ("grpc-retry-pushback-ms", "-1")

CODES: dict[Reason, grpc.StatusCode] = {
    Reason.INVALID_FIELD: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.SERVICE_UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    Reason.SERVICE_TIMEOUT: grpc.StatusCode.DEADLINE_EXCEEDED,
    Reason.INTERNAL: grpc.StatusCode.INTERNAL,
    Reason.SHUTTING_DOWN: grpc.StatusCode.UNAVAILABLE,
    Reason.NODE_NOT_PROVEN: grpc.StatusCode.PERMISSION_DENIED,
    Reason.CALLER_NOT_ALLOWED: grpc.StatusCode.PERMISSION_DENIED,
    Reason.NODE_NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Reason.NODE_ID_DUPLICATE: grpc.StatusCode.ALREADY_EXISTS,
    Reason.REVISION_COMPACTED: grpc.StatusCode.OUT_OF_RANGE,
    Reason.WRONG_NODE: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.MEASUREMENT_BUSY: grpc.StatusCode.UNAVAILABLE,
    Reason.CLUSTER_AMBIGUOUS: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.CLUSTER_NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Reason.MODEL_NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Reason.MODEL_ACCESS_DENIED: grpc.StatusCode.PERMISSION_DENIED,
    Reason.MODEL_WITHOUT_WEIGHTS: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.MODEL_MALFORMED: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.ARCHITECTURE_UNSUPPORTED: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.HUB_UNREACHABLE: grpc.StatusCode.UNAVAILABLE,
    Reason.NO_WORKERS: grpc.StatusCode.UNAVAILABLE,
    Reason.WORKER_NOT_ATTACHED: grpc.StatusCode.UNAVAILABLE,
    Reason.DOWNLOAD_NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Reason.DISK_FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.DOWNLOAD_FAILED: grpc.StatusCode.UNAVAILABLE,
    Reason.MODEL_IN_USE: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.NO_NODES: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.REQUIRED_NODE_UNKNOWN: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.NOT_ENOUGH_NODES: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.NOT_ENOUGH_MEMORY: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.NO_RING: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.TOPOLOGY_GATHERING: grpc.StatusCode.UNAVAILABLE,
    Reason.BACKEND_UNSUPPORTED: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.TOO_FEW_LAYERS: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.SHARDING_UNSUPPORTED: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.NOT_CALIBRATED: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.LINKS_NOT_VERIFIED: grpc.StatusCode.UNAVAILABLE,
    Reason.CUT_NOT_ALLOWED: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.INSTANCE_NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Reason.INSTANCE_EXISTS: grpc.StatusCode.ALREADY_EXISTS,
    Reason.INSTANCE_NOT_READY: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.INSTANCE_FAILED: grpc.StatusCode.UNAVAILABLE,
    Reason.NOT_HEAD: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.RING_PORT_IN_USE: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.PROMPT_EMPTY: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.PROMPT_TOO_LONG: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.QUEUE_FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.NO_CHAT_TEMPLATE: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.CHAT_TEMPLATE_FAILED: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.SHARD_FAILED: grpc.StatusCode.UNAVAILABLE,
    Reason.PHASE_TIMEOUT: grpc.StatusCode.DEADLINE_EXCEEDED,
    Reason.STAGES_UNSUPPORTED: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.NODE_LOST: grpc.StatusCode.UNAVAILABLE,
    Reason.CACHE_TOO_SMALL: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.INSTANCE_AMBIGUOUS: grpc.StatusCode.FAILED_PRECONDITION,
}


def known_error(error: Exception) -> ShardringError:
    """Return what callers may see of any exception; what nobody foresaw goes to the log."""
    if isinstance(error, ShardringError):
        return error
    if isinstance(error, AioRpcError):
        return error_from_rpc(error, service="a service", address="")
    logger.error("Unforeseen error", exc_info=error)
    return ShardringError(
        Reason.INTERNAL, "Something went wrong inside Shardring; the log of this process says more."
    )


def error_message(error: ShardringError) -> str:
    """Return an error's message as it may travel: on one line, for it may quote what steers a
    terminal, and not longer than trailers allow."""
    text = "".join(char if char.isprintable() else " " for char in error.message)
    # Other than ASCII takes three times its bytes in a trailer.
    return _cut(text, MOST_MESSAGE_BYTES if text.isascii() else MOST_MESSAGE_BYTES // 3)


def _bounded(metadata: dict[str, str]) -> dict[str, str]:
    """Return what trailers have room for: values cut, and the last keys left out."""
    bounded, left = {}, MOST_METADATA_BYTES
    for key, value in metadata.items():
        short = _cut(value, MOST_VALUE_BYTES)
        left -= len(key.encode()) + len(short.encode())
        if left < 0:
            break
        bounded[key] = short
    return bounded


def _cut(text: str, most_bytes: int) -> str:
    encoded = text.encode(errors="replace")
    if len(encoded) <= most_bytes:
        return encoded.decode()
    return encoded[:most_bytes].decode(errors="ignore") + "..."


def error_to_trailers(error: ShardringError) -> tuple[tuple[str, str | bytes], ...]:
    """Pack an error's reason, metadata and retry delay as grpc-status-details-bin."""
    message = error_message(error)
    details = [
        error_details_pb2.ErrorInfo(
            reason=error.reason, domain=DOMAIN, metadata=_bounded(error.metadata)
        )
    ]
    packed = [_pack(detail) for detail in details]
    if error.retry_delay_seconds is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(round(error.retry_delay_seconds * 1e9))
        packed.append(_pack(error_details_pb2.RetryInfo(retry_delay=delay)))
    status = status_pb2.Status(code=CODES[error.reason].value[0], message=message, details=packed)
    return ((STATUS_DETAILS_KEY, status.SerializeToString()), NO_RETRY)


def error_from_rpc(
    error: AioRpcError, *, service: str, address: str, why: str = ""
) -> ShardringError:
    """Return the error that a called service meant, or that it could not be reached.

    `service` and `address` name the callee in words: "topology", "127.0.0.1:52410". `why`: what is
    known, better than gRPC knows, of why it is not reached.
    """
    meant = _meant_error(error)
    if meant is not None:
        return meant
    named: dict[str, object] = {"service": service, "address": address}
    where = f"{service} at {address}" if address else service
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        details = error.details() or ""
        why = why or told(details)
        return ShardringError(
            Reason.SERVICE_UNAVAILABLE,
            f"Cannot reach {where}: {why or f'{details}. Is it running?'}",
            metadata=named,
            retry_delay_seconds=1,
        )
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return ShardringError(
            Reason.SERVICE_TIMEOUT, f"No answer in time from {where}.", metadata=named
        )
    return ShardringError(
        Reason.INTERNAL, f"{where} answered {error.code().name}: {error.details()}", metadata=named
    )


def error_to_proto(error: ShardringError) -> common_pb2.Error:
    """Return an error as data."""
    return common_pb2.Error(
        code=CODES[error.reason].value[0],
        reason=error.reason,
        message=error_message(error),
        metadata=_bounded(error.metadata),
    )


def error_from_proto(error: common_pb2.Error) -> ShardringError:
    """Return an error that was kept as data; INTERNAL when its reason is not known here."""
    reason = _reason(error.reason) or Reason.INTERNAL
    return ShardringError(reason, error.message, metadata=dict(error.metadata))


def _meant_error(error: AioRpcError) -> ShardringError | None:
    """Return the error that `error_to_trailers` packed, if there is one."""
    packed = dict(error.trailing_metadata()).get(STATUS_DETAILS_KEY)
    if not isinstance(packed, bytes):
        return None
    status = status_pb2.Status.FromString(packed)
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    reason, seconds = None, None
    for detail in status.details:
        if detail.Unpack(info) and info.domain == DOMAIN:
            reason = _reason(info.reason)
        elif detail.Unpack(retry):
            seconds = retry.retry_delay.ToNanoseconds() / 1e9
    if reason is None:
        return None
    return ShardringError(
        reason, status.message, metadata=dict(info.metadata), retry_delay_seconds=seconds
    )


def _reason(name: str) -> Reason | None:
    return Reason.__members__.get(name)


def _pack(message: error_details_pb2.ErrorInfo | error_details_pb2.RetryInfo) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed
