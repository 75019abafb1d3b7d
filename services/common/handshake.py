"""Why two ends could not agree on TLS, in words, and who is at the other end.

gRPC tells little of a failed handshake: where it does not say enough, one connection is made to
find out, and only then.
"""

import asyncio
import ssl
from collections.abc import Mapping, Sequence

from services.common.addresses import HostPort
from services.common.errors import Reason, ShardringError
from services.common.tls import Tls, named_nodes, node_host

_SECONDS = 3.0
_NO_TLS = (
    "it answers without TLS, and this side wants TLS. Start it with --tls-cert, --tls-key and "
    "--tls-ca, or leave these out here."
)
_WANTS_TLS = (
    "it wants TLS, and this side has none. Give --tls-cert, --tls-key and --tls-ca "
    "(SHARDRING_TLS_CERT, SHARDRING_TLS_KEY, SHARDRING_TLS_CA)."
)
_OTHER_CA = "its certificate was not issued by the CA of --tls-ca."
_EXPIRED = "its certificate has expired. Issue it a new one: shardring pki issue"
_NOT_YET = "its certificate is not valid yet. Are the clocks of both machines right?"
_REFUSED = {
    "UNKNOWN_CA": "it does not know the CA that issued this side's certificate.",
    "CERTIFICATE_EXPIRED": "this side's certificate has expired. Issue a new one: "
    "shardring pki issue",
    "CERTIFICATE_UNKNOWN": "it refuses this side's certificate: it may be of another CA, or "
    "expired by its clock.",
}


def names_another(details: str) -> bool:
    """Return whether a connection failed, by gRPC's words, for a certificate of another name."""
    return "Hostname Verification Check failed" in details


def told(details: str) -> str:
    """Return what gRPC's words on a failed connection mean where TLS is the reason; else ""."""
    if "WRONG_VERSION_NUMBER" in details:
        return _NO_TLS
    if "certificate has expired" in details:
        return _EXPIRED
    if "certificate is not yet valid" in details:
        return _NOT_YET
    if "CERTIFICATE_VERIFY_FAILED" in details:
        return _OTHER_CA
    if names_another(details):
        return (
            "its certificate does not name this address. Issue one that does: "
            "shardring pki issue --host ADDRESS"
        )
    return ""


async def explanation(
    details: str, addresses: Sequence[HostPort], tls: Tls | None, *, ask: bool
) -> str:
    """Return why a callee at `addresses` is not reached if TLS is why; else "".

    `details` are gRPC's words; with `ask`, where they are not enough, the callee is connected to
    once more. Takes three seconds at most.
    """
    if tls is not None and (why := told(details)):
        return why
    # Whoever does not like what it hears closes the connection; so does who just stops.
    if not ask or "Socket closed" not in details:
        return ""
    try:
        async with asyncio.timeout(_SECONDS):
            for address in addresses:
                if why := await _asked(address, tls):
                    return why
    except (TimeoutError, ShardringError):
        pass
    return ""


async def _asked(address: HostPort, tls: Tls | None) -> str:
    """Connect with TLS, and return what that says of the other end; "": nothing."""
    try:
        reader, writer = await _connected(address, tls)
    except (ssl.SSLError, OSError) as error:
        # What is no TLS gives none of its alerts.
        if tls is None:
            return _WANTS_TLS if "ALERT" in str(error).upper() else ""
        return _refusal(error)
    try:
        if tls is None:
            return _WANTS_TLS
        # Whether a server takes our certificate is told only after the handshake; one that does
        # speaks first.
        if await reader.read(1):
            return ""
    except (ssl.SSLError, OSError) as error:
        return _refusal(error)
    finally:
        writer.transport.abort()
    return (
        "it closes the connection. It may refuse this side's certificate, which is then of "
        "another CA than its own or has expired."
    )


def _refusal(error: Exception) -> str:
    code = str(getattr(error, "reason", "") or "").upper()
    return next((why for part, why in _REFUSED.items() if part in code), "")


async def wrong_node(addresses: Sequence[HostPort], tls: Tls, node_id: str) -> ShardringError:
    """Return the error for a node that is not the one at these addresses, naming who is."""
    found = await asyncio.gather(*(peer_node_id(address, tls) for address in addresses))
    others = zip(addresses, found, strict=True)
    where, other = next(
        ((at, other) for at, other in others if other not in ("", node_id)), (addresses[0], "")
    )
    return ShardringError(
        Reason.WRONG_NODE,
        f"At {where} {f'node {other}' if other else 'something that proves to be no node'} "
        f"answers, not node {node_id}.",
        metadata={"expected_node_id": node_id, "node_id": other},
    )


async def peer_node_id(address: HostPort, tls: Tls) -> str:
    """Return which node's certificate is shown at an address; "" when that is none of the CA's.

    Takes three seconds at most.
    """
    try:
        async with asyncio.timeout(_SECONDS):
            _, writer = await _connected(address, tls)
    except (OSError, TimeoutError, ShardringError):
        return ""
    try:
        shown: Mapping[str, object] = writer.get_extra_info("peercert") or {}
    finally:
        writer.transport.abort()
    names = shown.get("subjectAltName", ())
    assert isinstance(names, tuple)
    nodes = named_nodes(value for kind, value in names if kind == "URI")
    return nodes[0] if len(nodes) == 1 else ""


async def _connected(
    address: HostPort, tls: Tls | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Return a connection after its handshake. With `tls` None anybody's certificate will do."""
    if tls is None:
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    else:
        context = tls.client_context()
        # The certificate itself is what is asked for; it has to be of the CA all the same.
        context.check_hostname = False
    context.set_alpn_protocols(["h2"])
    return await asyncio.open_connection(
        address.host, address.port, ssl=context, server_hostname=node_host("any")
    )
