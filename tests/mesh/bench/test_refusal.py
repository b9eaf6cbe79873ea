"""A URL that cannot be loaded is told in one line that says what to write instead."""

import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from mesh.bench.http_target import models_at
from mesh.bench.report import CannotMeasure
from mesh.cli.certs import make_set


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs")
    make_set(folder)
    return folder


@contextmanager
def grpc_port(certificates: Path | None = None) -> Iterator[int]:
    """Of a gRPC server without services."""
    server = grpc.server(ThreadPoolExecutor(1))
    if certificates is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        pair = [(certificates / name).read_bytes() for name in ("gateway.key", "gateway.pem")]
        port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([tuple(pair)]))
    server.start()
    yield port
    server.stop(0).wait()


def refusal(url: str, ca: Path | None = None) -> str:
    with pytest.raises(CannotMeasure) as caught:
        models_at(url, ca=str(ca) if ca is not None else None)
    said = str(caught.value)
    assert "\n" not in said
    return said


def test_a_grpc_port_is_told_with_the_url_to_write():
    with grpc_port() as port:
        assert refusal(f"http://127.0.0.1:{port}").endswith(f"it is a gRPC port: write grpc://127.0.0.1:{port}")


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_grpc_port_with_tls_is_told_with_the_url_to_write(certificates, scheme):
    with grpc_port(certificates) as port:
        said = refusal(f"{scheme}://127.0.0.1:{port}", certificates / "ca.pem")
    assert f"write grpc://127.0.0.1:{port}, and name its CA with --ca FILE" in said


@pytest.fixture
def secure_url(server, certificates) -> str:
    """The server's, which speaks TLS here."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates / "gateway.pem", certificates / "gateway.key")
    context.set_alpn_protocols(["http/1.1"])
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    server.handle_error = lambda *_: None  # clients that speak no TLS
    return server.url.replace("http", "https")


def test_plain_http_to_a_tls_port_is_told_to_write_https_and_the_ca(secure_url):
    said = refusal(secure_url.replace("https", "http"))
    assert f"it speaks TLS: write {secure_url}, and name its CA with --ca FILE" in said


def test_a_certificate_of_an_unknown_ca_is_told_to_name_it(secure_url, certificates):
    assert "name its CA with --ca FILE" in refusal(secure_url)
    assert models_at(secure_url, ca=str(certificates / "ca.pem")) == [{"id": "good"}]


def test_https_to_a_plain_port_is_told_to_write_http(server):
    assert refusal(server.url.replace("http", "https")).endswith(f"it speaks no TLS: write {server.url}")


def test_a_server_that_wants_a_key_is_told_how_to_give_it(server, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server.RequestHandlerClass, "do_GET", lambda handler: handler._whole(401, {}))
    assert "--api-key KEY, or SHOAL_API_KEY" in refusal(server.url)


def test_a_url_without_its_scheme_is_told_its_form():
    assert "write http://HOST:PORT" in refusal("localhost:8000")
