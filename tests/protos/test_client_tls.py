"""The thin client over TLS: it believes the CA it was given, and shows a certificate where one is asked for."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

import shoal
from mesh.cli.authority import Authority, Validity
from shoal.gateway.v1 import gateway_pb2 as pb
from shoal.gateway.v1 import gateway_pb2_grpc as rpc

VALID = Validity.days(1)


class Gateway(rpc.InferenceServiceServicer):
    def ListModels(self, request: pb.ListModelsRequest, context: grpc.ServicerContext) -> pb.ListModelsResponse:
        return pb.ListModelsResponse(models=[pb.Model(name="tiny", workers=1)])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """ca.pem and a client's certificate, beside what `serve` uses."""
    authority = Authority(VALID)
    (tmp_path / "ca.pem").write_bytes(authority.pem)
    for identity, hosts in (("gateway", ("localhost",)), ("operator", ())):
        certificate, key = authority.issue(identity, VALID, hosts)
        (tmp_path / f"{identity}.pem").write_bytes(certificate)
        (tmp_path / f"{identity}.key").write_bytes(key)
    return tmp_path


@pytest.fixture
def serve(folder: Path) -> Iterator[Callable[[bool], int]]:
    """`serve(client_certificates)` starts a gateway and returns its port."""
    servers = []

    def start(client_certificates: bool) -> int:
        server = grpc.server(ThreadPoolExecutor(2))
        rpc.add_InferenceServiceServicer_to_server(Gateway(), server)
        pair = ((folder / "gateway.key").read_bytes(), (folder / "gateway.pem").read_bytes())
        credentials = grpc.ssl_server_credentials([pair], (folder / "ca.pem").read_bytes(), client_certificates)
        port = server.add_secure_port("127.0.0.1:0", credentials)
        server.start()
        servers.append(server)
        return port

    yield start
    for server in servers:
        server.stop(0).wait()


async def test_the_path_of_the_ca_is_enough(serve: Callable[[bool], int], folder: Path) -> None:
    port = serve(False)
    async with shoal.Client(f"localhost:{port}", tls=folder / "ca.pem") as client:
        assert [model.name for model in await client.models()] == ["tiny"]
    with shoal.SyncClient(f"localhost:{port}", tls=str(folder / "ca.pem")) as client:
        assert [model.name for model in client.models()] == ["tiny"]


def test_a_gateway_that_asks_for_certificates_takes_ours_and_nobody_without(
    serve: Callable[[bool], int], folder: Path
) -> None:
    port = serve(True)
    mine = shoal.ClientTls(ca=folder / "ca.pem", certificate=folder / "operator.pem", key=folder / "operator.key")
    with shoal.SyncClient(f"localhost:{port}", tls=mine) as client:
        assert client.models()
    with shoal.SyncClient(f"localhost:{port}", tls=folder / "ca.pem") as client, pytest.raises(shoal.Unavailable):
        client.models()


def test_an_address_that_the_certificate_does_not_name_needs_the_name_to_expect(
    serve: Callable[[bool], int], folder: Path
) -> None:
    port = serve(False)
    with shoal.SyncClient(f"127.0.0.1:{port}", tls=folder / "ca.pem") as client, pytest.raises(shoal.Unavailable):
        client.models()
    named = shoal.ClientTls(ca=folder / "ca.pem", server_name="gateway.shoal")
    with shoal.SyncClient(f"127.0.0.1:{port}", tls=named) as client:
        assert client.models()


def test_a_gateway_of_another_ca_is_not_believed(serve: Callable[[bool], int], tmp_path: Path) -> None:
    other = tmp_path / "other.pem"
    other.write_bytes(Authority(VALID).pem)
    with shoal.SyncClient(f"localhost:{serve(False)}", tls=other) as client, pytest.raises(shoal.Unavailable):
        client.models()


def test_files_that_do_not_go_together_or_are_not_there_are_said_at_once(folder: Path) -> None:
    with pytest.raises(ValueError, match="certificate and key"):
        shoal.SyncClient("localhost:1", tls=shoal.ClientTls(certificate=folder / "operator.pem"))
    with pytest.raises(FileNotFoundError, match=r"nothing\.pem"):
        shoal.Client("localhost:1", tls=folder / "nothing.pem")
