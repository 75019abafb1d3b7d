"""Certificates for tests: a CA in a folder, and what it issues."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from services.cli.pki import (
    CA_CERT,
    CA_KEY,
    Wish,
    create_authority,
    issue_certificate,
    read_authority,
)
from services.common.security import Security
from services.common.tls import Tls, node_host, node_uri


@dataclass(frozen=True)
class Files:
    """The folder of a CA."""

    folder: Path

    @staticmethod
    def made(folder: Path) -> "Files":
        """Make a CA in a folder."""
        create_authority(folder, "test", 30, replace=False)
        return Files(folder)

    def issue(self, name: str, *, node_id: str = "", client: bool = False) -> Tls:
        """Return a certificate's files; one for loopback, of a node, or of a client only."""
        wish = Wish(name, node_id=node_id, is_client=client, days=1)
        cert, key = issue_certificate(read_authority(self.folder), wish, self.folder, replace=True)
        return Tls(cert, key, self.folder / CA_CERT)

    def expired(self, name: str, node_id: str) -> Tls:
        """Return the files of a certificate whose time is over."""
        authority = read_authority(self.folder)
        issued = self.issue(name, node_id=node_id)
        key = ec.generate_private_key(ec.SECP256R1())
        then = datetime.now(UTC) - timedelta(days=9)
        names = x509.SubjectAlternativeName(
            [
                x509.UniformResourceIdentifier(node_uri(node_id)),
                x509.DNSName(node_host(node_id)),
                x509.DNSName("localhost"),
            ]
        )
        certificate = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .issuer_name(authority.certificate.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(then)
            .not_valid_after(then + timedelta(days=1))
            .add_extension(names, critical=False)
            .sign(authority.key, hashes.SHA256())
        )
        _write_pair(issued, certificate, key)
        return issued


def _write_pair(tls: Tls, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
    from cryptography.hazmat.primitives import serialization

    tls.cert.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    tls.key.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )


def variables(tls: Tls) -> dict[str, str]:
    """Return the environment variables that give a process these files."""
    return {
        "SHARDRING_TLS_CERT": str(tls.cert),
        "SHARDRING_TLS_KEY": str(tls.key),
        "SHARDRING_TLS_CA": str(tls.ca),
    }


def secured(tls: Tls, *allowed: str) -> Security:
    """Return how a process works that has these files."""
    return Security(tls, allowed=frozenset(allowed))


__all__ = ["CA_KEY", "Files", "secured", "variables"]
