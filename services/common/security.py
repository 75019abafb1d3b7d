"""How this process is reached and reaches others: with TLS, or in the clear where it was told to.

Set once, when a process starts; `start_server`, `Remote` and the hubs ask for it.
"""

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from services.common.errors import Reason, ShardringError
from services.common.options import option
from services.common.tls import Tls


@dataclass(frozen=True)
class TlsOptions:
    """The certificate with which a process calls others, and is called."""

    tls_cert: str = option(
        "",
        "Certificate of this process, in PEM. With --tls-key and --tls-ca all that it says and "
        "hears is encrypted, and both ends are known. `shardring pki` makes these files.",
        env="SHARDRING_TLS_CERT",
    )
    tls_key: str = option("", "Private key of --tls-cert, in PEM.", env="SHARDRING_TLS_KEY")
    tls_ca: str = option(
        "", "Certificate of the cluster's CA, in PEM: whom to trust.", env="SHARDRING_TLS_CA"
    )


@dataclass(frozen=True)
class ListenOptions(TlsOptions):
    """What whoever listens needs to know besides."""

    insecure: bool = option(
        False,
        "Listen on other than loopback without TLS: whoever reaches the port can do everything.",
        env="SHARDRING_INSECURE",
    )


@dataclass(frozen=True)
class ServerOptions(ListenOptions):
    """What a server with calls that change something needs to know besides."""

    allow: tuple[str, ...] = option(
        (),
        "Who may make calls that change something: the common name, subject or URI of a client's "
        "certificate. May be given several times. If never: everyone with a certificate of the CA.",
        env="SHARDRING_ALLOW",
    )


@dataclass(frozen=True)
class Security:
    """With `tls` None in the clear; then listening on other than loopback takes `insecure`.

    `allowed` names who may change something; nobody named: every certificate of the CA.
    """

    tls: Tls | None = None
    insecure: bool = False
    allowed: frozenset[str] = frozenset()

    def check_listen(self, host: str) -> str:
        """Return why this host must not be listened on; "" when it may."""
        if self.tls is not None or self.insecure or is_loopback(host):
            return ""
        return (
            f"Without TLS, whoever reaches {host} could do everything. Give --tls-cert, --tls-key "
            "and --tls-ca (`shardring pki` makes them), or listen on 127.0.0.1; on a network that "
            "you trust say --insecure (SHARDRING_INSECURE=1)."
        )


def is_loopback(host: str) -> bool:
    """Return whether only processes of this machine reach this host name or address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.rstrip(".").lower() == "localhost"


def security_of(options: TlsOptions) -> Security:
    """Return what options ask for, once the files were looked at.

    Raises INVALID_FIELD when only some of the three files are named or one is of no use, or when
    callers are to be told apart without TLS.
    """
    paths = (options.tls_cert, options.tls_key, options.tls_ca)
    allowed = frozenset(options.allow) if isinstance(options, ServerOptions) else frozenset()
    insecure = isinstance(options, ListenOptions) and options.insecure
    if not any(paths):
        if allowed:
            raise _refused("allow", "--allow tells callers apart by their certificates: it needs")
        return Security(insecure=insecure)
    if not all(paths):
        raise _refused("tls_cert", "TLS takes all three of")
    tls = Tls(*(Path(path).expanduser() for path in paths))
    tls.check_time()
    return Security(tls, insecure, allowed)


def use_security(options: TlsOptions) -> Security:
    """Have this process work as the options say, from now on. Raises as `security_of`."""
    global _current
    _current = security_of(options)
    return _current


def current_security() -> Security:
    """Return how this process works; in the clear, and on loopback only, if nobody said."""
    return _current


_current = Security()


def _refused(field: str, why: str) -> ShardringError:
    return ShardringError(
        Reason.INVALID_FIELD,
        f"{why} --tls-cert, --tls-key and --tls-ca.",
        metadata={"field": field, "value": "", "expected": "--tls-cert, --tls-key, --tls-ca"},
    )
