"""Who gets in with TLS on: the right certificate of the right CA, also while they are replaced, and nobody else."""

import asyncio
import logging
import os
import shutil
import ssl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from mesh.cli.authority import Authority, Validity
from mesh.client import connect
from mesh.server import Server
from mesh.tls import CACHE, GATEWAY, SCHEDULER, WORKER, Tls, TlsError
from shoal.cache.v1 import cache_pb2, cache_pb2_grpc

from .conftest import IDENTITIES, NAME, NOW, PAST, Cache, Service, refusal, serving, stats, write

NOBODY = 65534


def stranger(authority: Authority, mesh: Authority, valid: Validity = NOW) -> grpc.ChannelCredentials:
    """Believes the mesh's CA and shows a certificate of `authority`."""
    certificate, key = authority.issue(WORKER, valid)
    return grpc.ssl_channel_credentials(mesh.pem, key, certificate)


def secure(service: Service, credentials: grpc.ChannelCredentials) -> grpc.aio.Channel:
    return grpc.aio.secure_channel(
        service.address, credentials, options=[("grpc.ssl_target_name_override", "cache.shoal")]
    )


async def test_replicas_at_other_addresses_share_one_certificate(service: Service, folder: Path) -> None:
    async with serving(folder) as replica:
        for address in (service.address, replica.address, replica.address.replace("127.0.0.1", "localhost")):
            assert await stats(connect(address, Tls(folder, WORKER), CACHE)) == 1


async def test_strangers_get_nowhere_and_harm_nothing(service: Service, folder: Path, authority: Authority) -> None:
    other = Authority(NOW)
    channels = {
        "another CA": secure(service, stranger(other, authority)),
        "no certificate": secure(service, grpc.ssl_channel_credentials(authority.pem)),
        "expired": secure(service, stranger(authority, authority, PAST)),
        "no TLS": grpc.aio.insecure_channel(service.address),
    }
    async with connect(service.address, Tls(folder, WORKER), CACHE) as channel:
        friend = cache_pb2_grpc.CacheServiceStub(channel)
        for why, attempt in channels.items():
            assert (await refusal(attempt)).code() is grpc.StatusCode.UNAVAILABLE, why
            assert (await friend.Stats(cache_pb2.StatsRequest(), timeout=5)).hits == 1
    assert not any(service.refused(caller) for caller in (*IDENTITIES, "other"))


async def test_a_ca_of_the_same_name_is_another_ca(service: Service, authority: Authority) -> None:
    """Names prove nothing: a CA made by the same command has the same subject and another key."""
    error = await refusal(secure(service, stranger(Authority(NOW), authority)))
    assert error.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_client_refuses_a_server_that_is_somebody_else(folder: Path, authority: Authority) -> None:
    write(folder, CACHE, authority, name=WORKER)
    with pytest.raises(TlsError, match="name"):
        Tls(folder, CACHE)
    write(folder, CACHE, authority)
    async with serving(folder) as service:
        error = await refusal(connect(service.address, Tls(folder, WORKER), SCHEDULER))
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert "Hostname" in (error.details() or "")


async def test_a_client_refuses_a_server_of_another_ca(folder: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    write(elsewhere, CACHE, Authority(NOW))
    async with serving(elsewhere) as service:
        error = await refusal(connect(service.address, Tls(folder, WORKER), CACHE))
    assert error.code() is grpc.StatusCode.UNAVAILABLE


async def test_without_client_certificates_anybody_who_believes_the_ca_may_come_in(
    folder: Path, authority: Authority
) -> None:
    cache = Cache()
    server = Server({NAME: lambda s: cache_pb2_grpc.add_CacheServiceServicer_to_server(cache, s)})
    port = await server.start("127.0.0.1", 0, Tls(folder, CACHE), client_certificates=False)
    options = [("grpc.ssl_target_name_override", "cache.shoal")]
    credentials = grpc.ssl_channel_credentials(authority.pem)
    assert await stats(grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options=options)) == 1
    await server.drain(0)


async def test_new_certificates_are_used_without_a_restart(
    service: Service, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A whole new CA: running connections go on, new ones speak the new set, the old set is a stranger's."""
    old, worker = Tls(folder, WORKER).channel_credentials(), Tls(folder, WORKER)
    async with connect(service.address, worker, CACHE) as channel:
        running = cache_pb2_grpc.CacheServiceStub(channel)
        await running.Stats(cache_pb2.StatsRequest(), timeout=5)
        successor = Authority(NOW)
        with caplog.at_level(logging.INFO):
            for identity in IDENTITIES:
                write(folder, identity, successor)
            assert await stats(connect(service.address, worker, CACHE)) == 1
        assert (await running.Stats(cache_pb2.StatsRequest(), timeout=5)).hits == 1
    assert (await refusal(secure(service, old))).code() is grpc.StatusCode.UNAVAILABLE
    assert "new certificates from" in caplog.text


async def test_one_ca_takes_anothers_place_while_both_are_believed(service: Service, folder: Path) -> None:
    """What an operator does: believe both, replace the certificates one by one, believe the new one alone."""
    old, new = (folder / "ca.pem").read_bytes(), Authority(NOW)
    (folder / "ca.pem").write_bytes(old + new.pem)
    for identity in (CACHE, WORKER):
        assert await stats(connect(service.address, Tls(folder, WORKER), CACHE)) == 1
        write(folder, identity, new)
        (folder / "ca.pem").write_bytes(new.pem + old)
    assert await stats(connect(service.address, Tls(folder, WORKER), CACHE)) == 1
    (folder / "ca.pem").write_bytes(new.pem)
    assert await stats(connect(service.address, Tls(folder, WORKER), CACHE)) == 1


async def test_new_certificates_that_cannot_be_used_leave_the_former_ones_in_use_and_are_told_once(
    service: Service, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    worker = Tls(folder, WORKER)
    shutil.copy(folder / "worker.key", folder / "cache.key")
    for _ in range(3):
        assert await stats(connect(service.address, worker, CACHE)) == 1
    told = [record for record in caplog.records if "the former certificates stay in use" in record.message]
    assert len(told) == 1
    assert "cache.key: is not the key of cache.pem" in told[0].message


async def test_certificates_that_vanish_leave_the_former_ones_in_use(
    service: Service, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    worker = Tls(folder, WORKER)
    (folder / "cache.pem").unlink()
    for _ in range(3):
        assert await stats(connect(service.address, worker, CACHE)) == 1
    assert caplog.text.count("the former certificates stay in use") == 1


async def test_an_http_server_hands_new_connections_new_certificates(folder: Path, authority: Authority) -> None:
    context = Tls(folder, GATEWAY).http_server_context(client_certificates=False)
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=context)
    port = server.sockets[0].getsockname()[1]

    async def meets(believed: Authority) -> bool:
        client = ssl.create_default_context(cadata=believed.pem.decode())
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client, server_hostname="gateway.shoal")
        except ssl.SSLCertVerificationError:
            return False
        writer.close()
        return True

    successor = Authority(NOW)
    assert (await meets(authority), await meets(successor)) == (True, False)
    write(folder, GATEWAY, successor)
    assert (await meets(authority), await meets(successor)) == (False, True)
    server.close()
    await server.wait_closed()


def _break(folder: Path, what: str, mesh: Authority) -> None:
    if what == "missing":
        (folder / "worker.key").unlink()
    elif what == "mismatch":
        shutil.copy(folder / "gateway.key", folder / "worker.key")
    elif what == "expired":
        write(folder, WORKER, mesh, PAST)
    elif what == "expired ca":
        write(folder, WORKER, Authority(PAST))
    elif what == "stranger":
        write(folder, WORKER, Authority(NOW))
        (folder / "ca.pem").write_bytes(mesh.pem)
    elif what == "name":
        write(folder, WORKER, mesh, name=GATEWAY)
    elif what == "no key":
        (folder / "worker.key").write_text("nothing")
    elif what == "no certificate":
        (folder / "worker.pem").write_text("")
    elif what == "no ca":
        (folder / "ca.pem").write_text("")


@pytest.mark.parametrize(
    ("what", "file", "words"),
    [
        ("missing", "worker.key", "No such file"),
        ("mismatch", "worker.key", "is not the key of worker.pem"),
        ("expired", "worker.pem", "has expired"),
        ("expired ca", "ca.pem", "has expired"),
        ("stranger", "worker.pem", "is not signed by ca.pem"),
        ("name", "worker.pem", "does not carry the name worker.shoal"),
        ("no key", "worker.key", "is no PEM key"),
        ("no certificate", "worker.pem", "holds no PEM certificate"),
        ("no ca", "ca.pem", "holds no PEM certificate"),
    ],
)
def test_certificates_that_cannot_be_used_are_refused_by_file_with_what_to_do(
    what: str, file: str, words: str, folder: Path, authority: Authority
) -> None:
    _break(folder, what, authority)
    with pytest.raises(TlsError) as caught:
        Tls(folder, WORKER)
    assert str(caught.value).startswith(f"{folder / file}: {words}")
    assert "shoal certs" in str(caught.value)


@contextmanager
def as_nobody() -> Iterator[None]:
    """As a user who may not read everything, where this one may."""
    own = os.geteuid()
    os.seteuid(NOBODY if own == 0 else own)
    try:
        yield
    finally:
        os.seteuid(own)


def test_a_key_that_may_not_be_read_is_named(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as open_to_all:
        copy = shutil.copytree(folder, Path(open_to_all) / "certs")
        for each in (Path(open_to_all), copy):
            each.chmod(0o755)
        (copy / "worker.key").chmod(0)
        with as_nobody(), pytest.raises(TlsError, match=r"worker\.key: Permission denied"):
            Tls(copy, WORKER)
