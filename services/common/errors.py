"""The one kind of error that Shardring's own code raises, free of gRPC.

`services.common.status` maps it to a gRPC status and back.
"""

from enum import StrEnum, auto


class Reason(StrEnum):
    """Why something was refused: shardring.common.v1.ErrorReason without its prefix.

    Each is documented, with its metadata, in protos/shardring/common/v1/error_reason.proto.
    """

    @staticmethod
    def _generate_next_value_(name: str, *_: object) -> str:
        return name

    INVALID_FIELD = auto()
    SERVICE_UNAVAILABLE = auto()
    SERVICE_TIMEOUT = auto()
    INTERNAL = auto()
    SHUTTING_DOWN = auto()
    NODE_NOT_PROVEN = auto()
    CALLER_NOT_ALLOWED = auto()

    NODE_NOT_FOUND = auto()
    NODE_ID_DUPLICATE = auto()
    REVISION_COMPACTED = auto()
    WRONG_NODE = auto()
    MEASUREMENT_BUSY = auto()
    CLUSTER_AMBIGUOUS = auto()
    CLUSTER_NOT_FOUND = auto()

    MODEL_NOT_FOUND = auto()
    MODEL_ACCESS_DENIED = auto()
    MODEL_WITHOUT_WEIGHTS = auto()
    MODEL_MALFORMED = auto()
    ARCHITECTURE_UNSUPPORTED = auto()
    HUB_UNREACHABLE = auto()
    NO_WORKERS = auto()
    WORKER_NOT_ATTACHED = auto()
    DOWNLOAD_NOT_FOUND = auto()
    DISK_FULL = auto()
    DOWNLOAD_FAILED = auto()
    MODEL_IN_USE = auto()

    NO_NODES = auto()
    REQUIRED_NODE_UNKNOWN = auto()
    NOT_ENOUGH_NODES = auto()
    NOT_ENOUGH_MEMORY = auto()
    NO_RING = auto()
    TOPOLOGY_GATHERING = auto()
    BACKEND_UNSUPPORTED = auto()
    TOO_FEW_LAYERS = auto()
    SHARDING_UNSUPPORTED = auto()
    NOT_CALIBRATED = auto()
    LINKS_NOT_VERIFIED = auto()
    CUT_NOT_ALLOWED = auto()

    INSTANCE_NOT_FOUND = auto()
    INSTANCE_EXISTS = auto()
    INSTANCE_NOT_READY = auto()
    INSTANCE_FAILED = auto()
    NOT_HEAD = auto()
    RING_PORT_IN_USE = auto()
    PROMPT_EMPTY = auto()
    PROMPT_TOO_LONG = auto()
    QUEUE_FULL = auto()
    NO_CHAT_TEMPLATE = auto()
    CHAT_TEMPLATE_FAILED = auto()
    SHARD_FAILED = auto()
    PHASE_TIMEOUT = auto()
    STAGES_UNSUPPORTED = auto()
    NODE_LOST = auto()
    CACHE_TOO_SMALL = auto()
    INSTANCE_AMBIGUOUS = auto()


class ShardringError(Exception):
    """A refusal or fault with a documented reason.

    `message` is for people and says what to do; `metadata` holds figures for programs; with
    `retry_delay_seconds` the caller may try again after that time.
    """

    def __init__(
        self,
        reason: Reason,
        message: str,
        *,
        metadata: dict[str, object] | None = None,
        retry_delay_seconds: float | None = None,
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.metadata = {key: str(value) for key, value in (metadata or {}).items()}
        self.retry_delay_seconds = retry_delay_seconds

    def bare(self) -> "ShardringError":
        """Return the same error for keeping, without the traceback and all that it holds on to."""
        return ShardringError(
            self.reason,
            self.message,
            metadata={**self.metadata},
            retry_delay_seconds=self.retry_delay_seconds,
        )


def invalid_field(field: str, value: object, expected: str) -> ShardringError:
    """Return the error for a request field outside its range."""
    return ShardringError(
        Reason.INVALID_FIELD,
        f"{field} is {str(value)[:80]!r}; expected {expected}.",
        metadata={"field": field, "value": str(value)[:80], "expected": expected},
    )
