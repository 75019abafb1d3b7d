"""`shardring pki`: what is issued, and what is refused."""

import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from services.cli.main import cli
from services.cli.pki import Wish, create_authority, issue_certificate, read_authority
from services.common.errors import Reason, ShardringError
from services.common.security import ServerOptions, security_of
from services.common.tls import Tls

NODE = "0123456789abcdef0123456789abcdef"


def pki(folder: Path, *arguments: str) -> Result:
    return CliRunner().invoke(cli, ["pki", *arguments, "--folder", str(folder)])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "pki"
    made = pki(folder, "init")
    assert made.exit_code == 0, made.output
    return folder


def certificate(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def names(found: x509.Certificate) -> list[str]:
    alternatives = found.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    return [str(name.value) for name in alternatives.value]


def uses(found: x509.Certificate) -> set[x509.ObjectIdentifier]:
    return set(found.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)


def test_an_authority_signs_certificates_and_nothing_below_them(folder: Path) -> None:
    authority = certificate(folder / "ca.crt")
    basic = authority.extensions.get_extension_for_class(x509.BasicConstraints)
    assert basic.critical
    assert (basic.value.ca, basic.value.path_length) == (True, 0)
    assert authority.not_valid_after_utc > datetime.now(UTC) + timedelta(days=3_600)


def test_a_services_certificate_names_where_it_is_dialled(folder: Path) -> None:
    made = pki(folder, "issue", "studio-1", "--host", "10.0.0.5", "--host", "studio-1.local")
    assert made.exit_code == 0, made.output
    assert f"export SHARDRING_TLS_CERT={folder / 'studio-1.crt'}" in made.output
    found = certificate(folder / "studio-1.crt")
    found.verify_directly_issued_by(certificate(folder / "ca.crt"))
    assert names(found) == [
        "shardring://service/studio-1",
        *("10.0.0.5", "studio-1.local", "localhost", "127.0.0.1", "::1"),
    ]
    assert uses(found) == {ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH}
    lifetime = found.not_valid_after_utc - datetime.now(UTC)
    assert timedelta(days=396) < lifetime < timedelta(days=398)


def test_a_nodes_certificate_carries_its_id(folder: Path) -> None:
    assert pki(folder, "issue", "--node", NODE).exit_code == 0
    paths = (folder / f"node-{NODE[:12]}.crt", folder / f"node-{NODE[:12]}.key", folder / "ca.crt")
    assert names(certificate(paths[0]))[:2] == [
        f"shardring://node/{NODE}",
        f"{NODE}.node.shardring",
    ]
    assert Tls(*paths).node_ids == (NODE,)
    assert security_of(ServerOptions(str(paths[0]), str(paths[1]), str(paths[2]))).tls == Tls(
        *paths
    )


def test_a_clients_certificate_is_for_calling_only(folder: Path) -> None:
    assert pki(folder, "issue", "anna", "--client").exit_code == 0
    found = certificate(folder / "anna.crt")
    assert uses(found) == {ExtendedKeyUsageOID.CLIENT_AUTH}
    assert names(found) == ["shardring://client/anna"]


def test_keys_are_their_owners_only(folder: Path) -> None:
    assert pki(folder, "issue", "anna", "--client", "--out", str(folder / "deep")).exit_code == 0
    for path in (folder / "ca.key", folder / "deep" / "anna.key"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_nothing_is_overwritten_unless_told(folder: Path) -> None:
    assert pki(folder, "issue", "anna", "--client").exit_code == 0
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for again in (("init",), ("issue", "anna", "--client"), ("issue", "anna")):
        refused = pki(folder, *again)
        assert isinstance(refused.exception, ShardringError)
        assert "--replace" in refused.exception.message
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert pki(folder, "issue", "anna", "--client", "--replace").exit_code == 0
    assert (folder / "anna.key").read_bytes() != before["anna.key"]


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        (Wish("../anna"), "name is"),
        (Wish("ca"), "another name"),
        (Wish("a", ("10.0.0.5:52420",)), "no port"),
        (Wish("a", ("-x",)), "a host name"),
        (Wish("a", node_id="a/b"), "a node id"),
        (Wish("a", ("studio",), is_client=True), "neither --host"),
        (Wish("a", days=0), "1 to"),
    ],
)
def test_a_wish_without_sense_is_refused_and_leaves_nothing(
    folder: Path, wish: Wish, words: str
) -> None:
    before = sorted(folder.rglob("*"))
    with pytest.raises(ShardringError, match=words) as refused:
        issue_certificate(read_authority(folder), wish, folder, replace=False)
    assert refused.value.reason is Reason.INVALID_FIELD
    assert sorted(folder.rglob("*")) == before


def test_no_certificate_outlives_its_authority(tmp_path: Path) -> None:
    create_authority(tmp_path, "short", 2, replace=False)
    cert, _ = issue_certificate(read_authority(tmp_path), Wish("a"), tmp_path, replace=False)
    ends = certificate(tmp_path / "ca.crt").not_valid_after_utc
    assert certificate(cert).not_valid_after_utc == ends


@pytest.mark.parametrize("spoilt", ["ca.key", "ca.crt"])
def test_half_an_authority_issues_nothing(folder: Path, tmp_path: Path, spoilt: str) -> None:
    assert pki(tmp_path / "other", "init").exit_code == 0
    (folder / spoilt).write_bytes((tmp_path / "other" / spoilt).read_bytes())
    with pytest.raises(ShardringError, match="is the key of"):
        read_authority(folder)
    (folder / spoilt).write_text("nonsense")
    with pytest.raises(ShardringError, match="pki init"):
        read_authority(folder)
    (folder / spoilt).unlink()
    with pytest.raises(ShardringError, match="pki init"):
        read_authority(folder)


def test_a_node_id_is_told_again_and_again(tmp_path: Path) -> None:
    ask = ["pki", "node-id", "--data-dir", str(tmp_path / "data")]
    first, second = (CliRunner().invoke(cli, ask) for _ in range(2))
    assert first.exit_code == 0, first.output
    assert len(first.output.strip()) == 32
    assert first.output == second.output


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tls_cert": "a.crt"}, "all three"),
        ({"allow": ("anna",)}, "it needs"),
        ({"tls_cert": "none", "tls_key": "none", "tls_ca": "none"}, "cannot be read"),
    ],
)
def test_half_of_what_tls_takes_is_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(ShardringError, match=words):
        security_of(ServerOptions(**options))  # type: ignore[arg-type]


def test_files_that_do_not_fit_are_refused(folder: Path) -> None:
    for name in ("anna", "olga"):
        assert pki(folder, "issue", name, "--client").exit_code == 0
    anna, olga = (folder / f"{name}.crt" for name in ("anna", "olga"))
    for cert, key, ca, words in (
        (anna, olga.with_suffix(".key"), folder / "ca.crt", "is not the key of"),
        (folder / "ca.key", anna.with_suffix(".key"), folder / "ca.crt", "no certificate"),
        (anna, anna.with_suffix(".key"), folder / "ca.key", "no certificate"),
    ):
        with pytest.raises(ShardringError, match=words):
            security_of(ServerOptions(str(cert), str(key), str(ca)))
