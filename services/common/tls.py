"""Mutual TLS: one certificate, its key and the cluster's CA, and what is built of them.

A node's certificate names its node id twice: as a URI, by which callees know a caller, and as a
host name, under which callers look for it wherever it is dialled. Whoever connects to a node thus
learns in the handshake that it is the one that is meant; its addresses need not be in it.
"""

from __future__ import annotations

import functools
import logging
import ssl
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from services.common.errors import Reason, ShardringError

# What runs without TLS, or only for a moment, need not wait for these.
if TYPE_CHECKING:
    import grpc
    from cryptography import x509

logger = logging.getLogger(__name__)

_NODE_URI = "shardring://node/"
_NODE_DOMAIN = "node.shardring"

Stamp = tuple[tuple[int, int], ...]


def node_uri(node_id: str) -> str:
    """Return the URI by which a certificate names a node."""
    return f"{_NODE_URI}{node_id}"


def node_host(node_id: str) -> str:
    """Return the host name under which a node's certificate is looked for."""
    return f"{node_id}.{_NODE_DOMAIN}"


def named_nodes(uris: Iterable[str]) -> tuple[str, ...]:
    """Return the ids of the nodes that a certificate's URIs name."""
    return tuple(uri.removeprefix(_NODE_URI) for uri in uris if uri.startswith(_NODE_URI))


@dataclass(frozen=True)
class Pair:
    """What is in the three files, as PEM, and the certificate read."""

    certificates: bytes
    key: bytes
    authorities: bytes
    certificate: x509.Certificate


@dataclass(frozen=True)
class Tls:
    """The files of one process: `cert` (PEM, its issuers after it), `key` and `ca`.

    Servers look at the files at each new connection, clients when they make a channel: what is
    renewed on disk is used from then on.
    """

    cert: Path
    key: Path
    ca: Path

    def pair(self) -> Pair:
        """Return what the files hold. Raises INVALID_FIELD when they are of no use, naming why."""
        return _read(self)

    def check_time(self) -> None:
        """Raise INVALID_FIELD when the certificate's time is over, or has not come."""
        certificate, now = self.pair().certificate, datetime.now(UTC)
        if now > certificate.not_valid_after_utc:
            ended = f"expired on {certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC"
            raise _useless("tls_cert", self.cert, f"{ended}. Issue a new one: shardring pki issue")
        if now < certificate.not_valid_before_utc:
            begins = f"is valid from {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC only"
            raise _useless("tls_cert", self.cert, f"{begins}. Is this machine's clock right?")

    @property
    def node_ids(self) -> tuple[str, ...]:
        """The nodes for which this certificate speaks: one, or none."""
        return named_nodes(_uris(self.pair().certificate))

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Return what a client shows and whom it trusts."""
        import grpc

        pair = self.pair()
        return grpc.ssl_channel_credentials(pair.authorities, pair.key, pair.certificates)

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return what a server shows; it takes no client without a certificate of the CA."""
        import grpc

        renewed = _Renewed(self)
        first = _configuration(self.pair())
        return grpc.dynamic_ssl_server_credentials(
            first,
            # None: no change.
            lambda: _configuration(pair) if (pair := renewed.pair()) else None,  # type: ignore[arg-type,return-value]
            require_client_authentication=True,
        )

    def client_context(self) -> ssl.SSLContext:
        """Return the same for HTTP: what a client shows and whom it trusts."""
        self.pair()
        context = ssl.create_default_context(cafile=self.ca)
        context.load_cert_chain(self.cert, self.key)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        return context

    def server_context(self, *, mutual: bool = True) -> ssl.SSLContext:
        """Return the same for an HTTP server; `mutual` False takes clients without certificate."""

        def made() -> ssl.SSLContext:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=self.ca)
            context.load_cert_chain(self.cert, self.key)
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            context.verify_mode = ssl.CERT_REQUIRED if mutual else ssl.CERT_NONE
            return context

        self.pair()
        newest = [made()]
        renewed = _Renewed(self)

        def choose(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
            if renewed.pair() is not None:
                newest[0] = made()
            connection.context = newest[0]

        newest[0].sni_callback = choose
        return newest[0]


class _Renewed:
    """Tells when the files are others than before, and whole. gRPC asks from its own threads."""

    def __init__(self, tls: Tls) -> None:
        self._tls = tls
        self._stamp = _stamp(tls)
        self._lock = threading.Lock()

    def pair(self) -> Pair | None:
        """Return what is new; None when nothing is, or when it is of no use yet."""
        with self._lock:
            stamp = _stamp(self._tls)
            if stamp == self._stamp:
                return None
            self._stamp = stamp
            try:
                pair = self._tls.pair()
            except ShardringError as error:
                # Perhaps half of it is written: the old one serves until there is more.
                logger.warning("Keeping the TLS certificate from before: %s", error.message)
                return None
            logger.info("Taking up the renewed TLS certificate %s", self._tls.cert)
            return pair


def _configuration(pair: Pair) -> grpc.ServerCertificateConfiguration:
    import grpc

    return grpc.ssl_server_certificate_configuration(
        [(pair.key, pair.certificates)], pair.authorities
    )


def _stamp(tls: Tls) -> Stamp:
    """Return what differs when one of the files was written."""
    stamps = []
    for path in (tls.cert, tls.key, tls.ca):
        try:
            stat = path.stat()
        except OSError:
            stamps.append((0, 0))
        else:
            stamps.append((stat.st_mtime_ns, stat.st_size))
    return tuple(stamps)


def _read(tls: Tls) -> Pair:
    return _read_at(tls, _stamp(tls))


@functools.lru_cache(maxsize=8)
def _read_at(tls: Tls, _stamp: Stamp) -> Pair:
    """Read and check the files. Channels are made often, of files that rarely change."""
    from cryptography import x509

    texts = [_bytes(f"tls_{name}", getattr(tls, name)) for name in ("cert", "key", "ca")]
    try:
        certificate = x509.load_pem_x509_certificate(texts[0])
    except ValueError as error:
        raise _useless("tls_cert", tls.cert, "holds no certificate in PEM") from error
    try:
        x509.load_pem_x509_certificates(texts[2])
    except ValueError as error:
        raise _useless("tls_ca", tls.ca, "holds no certificate in PEM") from error
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # A pass phrase would be asked for on the terminal, where nobody is.
        context.load_cert_chain(tls.cert, tls.key, password=lambda: b"")
    except (ssl.SSLError, OSError) as error:
        what = f"is not the key of {tls.cert}, or has a pass phrase"
        raise _useless("tls_key", tls.key, what) from error
    return Pair(texts[0], texts[1], texts[2], certificate)


def _bytes(field: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _useless(field, path, f"cannot be read: {error.strerror}") from error


def _useless(field: str, path: Path, why: str) -> ShardringError:
    return ShardringError(
        Reason.INVALID_FIELD,
        f"{path} (--{field.replace('_', '-')}) {why}.",
        metadata={"field": field, "value": str(path), "expected": "PEM files that fit"},
    )


def _uris(certificate: x509.Certificate) -> list[str]:
    from cryptography import x509

    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return []
    return names.value.get_values_for_type(x509.UniformResourceIdentifier)
