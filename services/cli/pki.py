"""A cluster's certificate authority, and the certificates that it issues, as files."""

import ipaddress
import os
import re
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
    signed = (
        _builder(_named(wish.name), issuer.subject, public, wish.days, issuer.not_valid_after_utc)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
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


def readable(certificate: x509.Certificate) -> str:
    """Return what a certificate says, on one line, for people."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        said = []
    else:
        said = [str(name.value) for name in names]
    until = f"until {certificate.not_valid_after_utc:%Y-%m-%d}"
    return ", ".join((certificate.subject.rfc4514_string(), *said, until))


def _alternatives(wish: Wish) -> list[x509.GeneralName]:
    """Return whom a certificate names, beside its subject."""
    if wish.is_client:
        return [x509.UniformResourceIdentifier(f"shardring://client/{wish.name}")]
    names: list[x509.GeneralName] = []
    if wish.node_id:
        names.append(x509.UniformResourceIdentifier(node_uri(wish.node_id)))
        names.append(x509.DNSName(node_host(wish.node_id)))
    else:
        names.append(x509.UniformResourceIdentifier(f"shardring://service/{wish.name}"))
    for host in dict.fromkeys((*wish.hosts, "localhost", "127.0.0.1", "::1")):
        names.append(_host(host))
    return names


def _host(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text.removeprefix("[").removesuffix("]")))
    except ValueError:
        if not _HOST.fullmatch(text):
            raise invalid_field("host", text, "a host name or an IP address, no port") from None
        return x509.DNSName(text)


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    days: int,
    latest: datetime | None = None,
) -> x509.CertificateBuilder:
    """Return a certificate that ends after so many days, at `latest` at the latest."""
    now = datetime.now(UTC)
    ends = now + timedelta(days=days)
    if latest is not None and latest <= now:
        raise ShardringError(
            Reason.INVALID_FIELD,
            f"The certificate authority expired on {latest:%Y-%m-%d}. Make a new one with "
            "shardring pki init --replace, and issue all certificates anew.",
            metadata={"field": "folder", "value": CA_CERT, "expected": "one that is valid"},
        )
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(ends if latest is None else min(ends, latest))
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _written(
    cert_path: Path,
    key_path: Path,
    certificate: x509.Certificate,
    key: ec.EllipticCurvePrivateKey,
    *,
    replace: bool,
) -> tuple[Path, Path]:
    """Write both files, each whole or not at all; the key is its owner's only, from the start."""
    for path in (cert_path, key_path):
        if path.exists() and not replace:
            raise ShardringError(
                Reason.INVALID_FIELD,
                f"{path} is there already. Say --replace to write another one in its place.",
                metadata={"field": "out", "value": str(path), "expected": "a file not there yet"},
            )
    secret = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    try:
        for path in (cert_path, key_path):
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _write(key_path, secret, 0o600)
        _write(cert_path, certificate.public_bytes(serialization.Encoding.PEM), 0o644)
    except OSError as error:
        raise ShardringError(
            Reason.INVALID_FIELD,
            f"Cannot write {error.filename or cert_path}: {error.strerror}.",
            metadata={"field": "out", "value": str(cert_path.parent), "expected": "a folder"},
        ) from error
    return cert_path, key_path


def _write(path: Path, content: bytes, mode: int) -> None:
    fresh = path.with_name(path.name + ".new")
    fresh.unlink(missing_ok=True)
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)


def _check_name(field: str, name: str) -> None:
    if not _NAME.fullmatch(name):
        raise invalid_field(field, name, "1 to 63 letters, digits, and . _ @ - after the first")


def _check_days(days: int) -> None:
    if not 1 <= days <= CA_DAYS:
        raise invalid_field("days", days, f"1 to {CA_DAYS}")
