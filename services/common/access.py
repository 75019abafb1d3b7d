"""Who may make which call, where callers are known by their certificates.

One table names the calls that change something. All others, and those of gRPC itself, are open to
every certificate of the cluster's CA.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
from grpc.aio import ServerInterceptor, ServicerContext

from services.common.errors import Reason, ShardringError
from services.common.interceptors import Handler, wrapped
from services.common.tls import named_nodes

Context = ServicerContext[Any, Any]


@dataclass(frozen=True)
class Rule:
    """Who may make a call; one of these is enough.

    `own`: the node that this field of the (first) message names. `nodes`: any node of the cluster.
    `clients`: everyone, or those who were named with --allow.
    """

    own: str = ""
    nodes: bool = False
    clients: bool = False


_TOPOLOGY = "/shardring.topology.v1.TopologyService"
_DOWNLOADS = "/shardring.downloads.v1.DownloadsService"
_INSTANCES = "/shardring.runner.v1.InstanceService"
_SHARDS = "/shardring.runner.v1.ShardService"

CHANGING: dict[str, Rule] = {
    f"{_TOPOLOGY}/ReportNode": Rule(own="node.node_id"),
    f"{_TOPOLOGY}/ReportLinks": Rule(own="source_node_id"),
    f"{_TOPOLOGY}/RemoveNode": Rule(own="node_id", clients=True),
    f"{_DOWNLOADS}/AttachWorker": Rule(own="hello.node_id"),
    f"{_DOWNLOADS}/AssignSources": Rule(own="node_id"),
    f"{_DOWNLOADS}/StartDownload": Rule(own="node_id", clients=True),
    f"{_DOWNLOADS}/CancelDownload": Rule(nodes=True, clients=True),
    f"{_DOWNLOADS}/DeleteModel": Rule(clients=True),
    # Throws away what is corrupt.
    f"{_DOWNLOADS}/VerifyModel": Rule(clients=True),
    f"{_INSTANCES}/StartInstance": Rule(clients=True),
    f"{_INSTANCES}/StopInstance": Rule(clients=True),
    f"{_SHARDS}/StartShard": Rule(nodes=True),
    f"{_SHARDS}/StopShard": Rule(nodes=True),
}


@dataclass(frozen=True)
class Caller:
    """Whom a client's certificate names: itself in several ways, and nodes."""

    names: tuple[str, ...]
    node_ids: tuple[str, ...]

    @property
    def label(self) -> str:
        """The caller in a message to people."""
        return self.names[0] if self.names else "a caller without a name"


def caller_of(context: Context) -> Caller:
    """Return who calls. Over TLS, the handshake has proven it."""
    proven = context.auth_context()

    def texts(key: str) -> list[str]:
        return [value.decode(errors="replace") for value in proven.get(key, ())]

    uris = texts("peer_uri")
    names = (*texts("x509_common_name"), *texts("x509_subject"), *uris)
    return Caller(names, named_nodes(uris))


def check_caller(
    caller: Caller, rule: Rule, allowed: frozenset[str], method: str, node_id: str
) -> None:
    """Raise unless a caller may make a call; `node_id` is the one that it speaks for, "" for none.

    Raises NODE_NOT_PROVEN and CALLER_NOT_ALLOWED.
    """
    if rule.own and node_id and node_id in caller.node_ids:
        return
    if rule.nodes and caller.node_ids:
        return
    if rule.clients and (not allowed or allowed.intersection(caller.names)):
        return
    if rule.clients:
        raise ShardringError(
            Reason.CALLER_NOT_ALLOWED,
            f"{caller.label} may not call {method} here: the server was started with --allow for "
            "others.",
            metadata={"caller": caller.label, "method": method},
        )
    named = " and ".join(caller.node_ids) or "none"
    wanted = f"node {node_id!r}" if rule.own else "a node"
    raise ShardringError(
        Reason.NODE_NOT_PROVEN,
        f"{method} is for {wanted} to call, and the certificate of {caller.label} names {named}. "
        "Give a node a certificate of its own: shardring pki issue --node ID",
        metadata={
            "caller": caller.label,
            "method": method,
            "node_id": node_id,
            "certificate_node_id": ",".join(caller.node_ids),
        },
    )


class AccessInterceptor(ServerInterceptor):
    """Refuses calls of the table to those who may not make them; for servers with TLS.

    Stands inside the error interceptor, which turns its errors into statuses.
    """

    def __init__(self, allowed: frozenset[str]) -> None:
        self._allowed = allowed

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Wrap the handler of a call that changes something."""
        handler = await continuation(handler_call_details)
        path: Any = handler_call_details.method
        rule = CHANGING.get(path)
        if handler is None or rule is None:
            return handler
        method = path.rpartition("/")[2]

        def check(request: Any, context: Context) -> None:
            node_id = _field(request, rule.own) if rule.own else ""
            check_caller(caller_of(context), rule, self._allowed, method, node_id)

        look = _first_checked if handler.request_streaming else _checked
        return wrapped(handler, partial(look, check))


Check = Callable[[Any, Context], None]


def _checked(check: Check, behaviour: Callable[..., Any]) -> Callable[..., Any]:
    """Return a behaviour that looks at its request before anything else."""

    def handle(request: Any, context: Context) -> Any:
        check(request, context)
        return behaviour(request, context)

    return handle


def _first_checked(check: Check, behaviour: Callable[..., Any]) -> Callable[..., Any]:
    """Return a behaviour that looks at the first of its requests; those after it belong to it."""

    async def checked(requests: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
        is_first = True
        async for request in requests:
            if is_first:
                check(request, context)
                is_first = False
            yield request

    def handle(requests: AsyncIterator[Any], context: Context) -> Any:
        return behaviour(checked(requests, context), context)

    return handle


def _field(message: Any, path: str) -> str:
    for name in path.split("."):
        message = getattr(message, name)
    return str(message)
