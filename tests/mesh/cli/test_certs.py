"""`shoal certs` makes a set that every service can use, and never takes away what is there."""

import re
import ssl
import stat
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from mesh.cli.main import app
from mesh.cli.problem import Problem
from mesh.tls import IDENTITIES, Tls, server_name


def certs(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["certs", *arguments])


def told(folder: Path, name: str, *what: str) -> str:
    """What openssl says of a certificate."""
    command = ["openssl", "x509", "-in", str(folder / name), "-noout", *what]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout


def test_every_identity_of_a_set_can_be_used(tmp_path: Path) -> None:
    assert certs(str(tmp_path / "set")).exit_code == 0
    for identity in IDENTITIES:
        assert Tls(tmp_path / "set", identity).current().certificate
        assert f"DNS:{server_name(identity)}" in told(tmp_path / "set", f"{identity}.pem", "-ext", "subjectAltName")


def test_keys_are_their_owners_alone_and_on_p_256(tmp_path: Path) -> None:
    certs(str(tmp_path / "set"))
    keys = list((tmp_path / "set").glob("*.key"))
    assert len(keys) == 1 + len(IDENTITIES)
    assert {stat.S_IMODE(key.stat().st_mode) for key in keys} == {0o600}
    assert stat.S_IMODE((tmp_path / "set").stat().st_mode) == 0o700
    assert "prime256v1" in told(tmp_path / "set", "worker.pem", "-text")


def test_the_gateways_certificate_carries_loopback_and_the_given_hosts_and_no_other_does(tmp_path: Path) -> None:
    certs(str(tmp_path), "--host", "mesh.example.com", "--host", "192.0.2.7", "--host", "*.example.org", "--force")
    names = told(tmp_path, "gateway.pem", "-ext", "subjectAltName")
    for name in ("DNS:localhost", "IP Address:127.0.0.1", "DNS:mesh.example.com", "IP Address:192.0.2.7"):
        assert name in names
    assert "DNS:*.example.org" in names
    assert "localhost" not in told(tmp_path, "worker.pem", "-ext", "subjectAltName")


@pytest.mark.parametrize(
    "host",
    ["https://mesh.example.com", "mesh:8000", "", "a" * 64 + ".org", "abc." * 64 + "org", "a..b", "über.example"],
)
def test_a_host_that_is_none_is_refused_and_nothing_is_written(host: str, tmp_path: Path) -> None:
    result = certs(str(tmp_path / "set"), "--host", host)
    assert isinstance(result.exception, Problem)
    assert not (tmp_path / "set").exists()


def test_days_are_the_validity(tmp_path: Path) -> None:
    certs(str(tmp_path), "--days", "3")
    for name in ("ca.pem", "cache.pem"):
        ends = re.search("notAfter=(.*)", told(tmp_path, name, "-enddate"))
        starts = re.search("notBefore=(.*)", told(tmp_path, name, "-startdate"))
        assert ends is not None
        assert starts is not None
        seconds = ssl.cert_time_to_seconds(ends[1]) - ssl.cert_time_to_seconds(starts[1])
        assert 3 * 86_400 <= seconds < 3 * 86_400 + 600


def test_nothing_is_overwritten_without_force(tmp_path: Path) -> None:
    (tmp_path / "worker.key").write_text("precious")
    result = certs(str(tmp_path))
    assert isinstance(result.exception, Problem)
    assert "worker.key" in result.exception.message
    assert "--force" in result.exception.advice
    assert [path.name for path in tmp_path.iterdir()] == ["worker.key"]
    assert (tmp_path / "worker.key").read_text() == "precious"
    assert certs(str(tmp_path), "--force").exit_code == 0
    assert Tls(tmp_path, "worker").current().key != b"precious"


def test_what_was_made_and_how_to_use_it_is_told(tmp_path: Path) -> None:
    result = certs(str(tmp_path))
    assert "gateway.pem gateway.key" in result.stdout
    assert f"SHOAL_TLS_DIR={tmp_path} shoal up" in result.stdout
    assert f"--cacert {tmp_path / 'ca.pem'}" in result.stdout


def test_without_a_folder_they_go_where_up_looks_for_them(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHOAL_TLS_DIR", raising=False)
    assert certs().exit_code == 0
    assert (home / "certs" / "ca.pem").is_file()


def test_a_folder_that_cannot_be_made_is_a_problem_in_words(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = certs(str(tmp_path / "file" / "set"))
    assert isinstance(result.exception, Problem)
    assert "cannot write" in result.exception.message
