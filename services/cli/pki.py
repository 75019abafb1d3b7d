"""A cluster's certificate authority, and the certificates that it issues, as files."""

import ipaddress
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from services.common.errors import Reason, ShardringError, invalid_field
from services.common.tls import node_host, node_uri

CA_CERT, CA_KEY = "ca.crt", "ca.key"
CA_DAYS = 3_650
# As long as public authorities may; whoever leaves is out after a year.
DAYS = 397
# Clocks of machines differ a little.
_SKEW = timedelta(minutes=5)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,62}")
_NODE_ID = re.compile(r"[0-9a-z]([0-9a-z-]{0,61}[0-9a-z])?")
_HOST = re.compile(r"(?=.{1,253}\Z)[A-Za-z0-9]([\w-]*\w)?(\.\w([\w-]*\w)?)*", re.ASCII)


@dataclass(frozen=True)
class Authority:
    """A CA: its certificate and key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


@dataclass(frozen=True)
class Wish:
    """What a certificate is to say.

    `name` is its common name. With `node_id` it is that node's; with `is_client` it cannot serve.
    `hosts` are the names and addresses at which a server is dialled, beside those of loopback.
    """

    name: str
    hosts: tuple[str, ...] = ()
    node_id: str = ""
    is_client: bool = False
    days: int = DAYS


def create_authority(folder: Path, name: str, days: int, *, replace: bool) -> tuple[Path, Path]:
    """Make a CA in a folder; return its certificate's path and its key's.

    Raises INVALID_FIELD when there is one already, unless told to replace it.
    """
    _check_name("name", name)
    _check_days(days)
    key = ec.generate_private_key(ec.SECP256R1())
    public = key.public_key()
    subject = _named(name)
    usage = x509.SubjectKeyIdentifier.from_public_key(public)
    certificate = (
        _builder(subject, subject, public, days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .add_extension(usage, critical=False)
        .sign(key, hashes.SHA256())
    )
    return _written(folder / CA_CERT, folder / CA_KEY, certificate, key, replace=replace)


def read_authority(folder: Path) -> Authority:
    """Return the CA in a folder. Raises INVALID_FIELD when there is none that can sign."""
    try:
        certificate = x509.load_pem_x509_certificate((folder / CA_CERT).read_bytes())
        key = serialization.load_pem_private_key((folder / CA_KEY).read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise ShardringError(
            Reason.INVALID_FIELD,
            f"{folder} holds no certificate authority that can be used: {error}. Make one with "
            "shardring pki init, or name its folder with --folder.",
            metadata={"field": "folder", "value": str(folder), "expected": f"{CA_CERT}, {CA_KEY}"},
        ) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or (
        key.public_key() != certificate.public_key()
    ):
        raise invalid_field("folder", folder, f"a folder whose {CA_KEY} is the key of {CA_CERT}")
    return Authority(certificate, key)


def issue_certificate(
    authority: Authority, wish: Wish, folder: Path, *, replace: bool
) -> tuple[Path, Path]:
    """Make a key and a certificate for it; return the certificate's path and the key's.

    Raises INVALID_FIELD for a wish that makes no sense, and when there is one of that name
    already, unless told to replace it.
    """
    _check_name("name", wish.name)
    _check_days(wish.days)
    if wish.name == "ca":
        raise invalid_field("name", wish.name, "another name than the authority's")
    if wish.node_id and not _NODE_ID.fullmatch(wish.node_id):
        raise invalid_field("node", wish.node_id, "a node id: shardring pki node-id says it")
    if wish.is_client and (wish.hosts or wish.node_id):
        raise invalid_field("client", "set", "neither --host nor --node beside it")
    key = ec.generate_private_key(ec.SECP256R1())
    public = key.public_key()
    uses = [ExtendedKeyUsageOID.CLIENT_AUTH]
    if not wish.is_client:
        uses.append(ExtendedKeyUsageOID.SERVER_AUTH)
    issuer = authority.certificate
    ends = min(
        datetime.now(UTC) + timedelta(days=wish.days),
        issuer.not_valid_after_utc,
    )
    certificate = (
        _builder(_named(wish.name), issuer.subject, public, wish.days)
        ._replace_end(ends)
        if False
        else _builder(_named(wish.name), issuer.subject, public, wish.days, latest=ends)
    )
    signed = (
        certificate.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        .add_extension(x509.SubjectAlternativeName(_alternatives(wish)), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key()),
            critical=False,
        )
        .sign(authority.key, hashes.SHA256())
    )
    try:
        signed.verify_directly_issued_by(issuer)
    except (InvalidSignature, ValueError, TypeError) as error:
        raise invalid_field("folder", CA_CERT, "a certificate authority's own files") from error
    paths = (folder / f"{wish.name}.crt", folder / f"{wish.name}.key")
    return _written(*paths, signed, key, replace=replace)
