"""Who gets in with TLS on: the right certificate of the right CA with the right role, and nobody else."""

import asyncio
import datetime
import logging
import os
import shutil
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client import CollectorRegistry

from mesh.callers import OnlyFrom
from mesh.cli.authority import Authority, Validity
from mesh.client import connect
from mesh.errors import PermissionDenied, error_of
from mesh.expiry import Expiry, ending_soon
from mesh.server import Server
from mesh.tls import CACHE, GATEWAY, OPERATOR, SCHEDULER, WORKER, Tls, TlsError
from shoal.cache.v1 import cache_pb2, cache_pb2_grpc

NAME = "shoal.cache.v1.CacheService"
CALLERS = (WORKER, OPERATOR)
IDENTITIES = (GATEWAY, WORKER, CACHE, OPERATOR)
NOW = Validity.days(30)
PAST = Validity(
    datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=2),
    datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1),
)


def write(folder: Path, identity: str, authority: Authority, valid: Validity = NOW, name: str = "") -> None:
    """A certificate for `identity`, or under its file name for the identity `name`."""
    folder.mkdir(exist_ok=True)
    (folder / "ca.pem").write_bytes(authority.pem)
    certificate, key = authority.issue(name or identity, valid)
    (folder / f"{identity}.pem").write_bytes(certificate)
    (folder / f"{identity}.key").write_bytes(key)


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority(NOW)


@pytest.fixture
def folder(tmp_path: Path, authority: Authority) -> Path:
    folder = tmp_path / "certs"
    for identity in IDENTITIES:
        write(folder, identity, authority)
    return folder


class Cache(cache_pb2_grpc.CacheServiceServicer):
    """A call that is answered, and one that streams."""

    async def Stats(self, request: cache_pb2.StatsRequest, context: grpc.aio.ServicerContext) -> cache_pb2.StatsReply:
        return cache_pb2.StatsReply(hits=1)

    async def Get(
        self, request: cache_pb2.GetRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[cache_pb2.Chunk]:
        yield cache_pb2.Chunk()
        yield cache_pb2.Chunk()


class Service:
    """A cache service that runs with the certificates of a folder."""

    def __init__(self, folder: Path) -> None:
        self.registry = CollectorRegistry()
        self.tls = Tls(folder, CACHE)
        self.server = Server(
            {NAME: lambda server: cache_pb2_grpc.add_CacheServiceServicer_to_server(Cache(), server)},
            [OnlyFrom(CALLERS, self.registry)],
        )
        self.address = ""

    def refused(self, caller: str) -> float:
        return self.registry.get_sample_value("shoal_tls_refused_calls_total", {"caller": caller}) or 0.0


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[Service]:
    service = Service(folder)
    service.address = f"127.0.0.1:{await service.server.start('127.0.0.1', 0, service.tls)}"
    try:
        yield service
    finally:
        await service.server.drain(0)


@pytest.fixture
async def service(folder: Path) -> AsyncIterator[Service]:
    async with serving(folder) as service:
        yield service


async def stats(channel: grpc.aio.Channel) -> int:
    async with channel:
        stub = cache_pb2_grpc.CacheServiceStub(channel)
        return (await stub.Stats(cache_pb2.StatsRequest(), timeout=5)).hits


async def refusal(channel: grpc.aio.Channel) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stats(channel)
    return refused.value


def stranger(authority: Authority, mesh: Authority, valid: Validity = NOW) -> grpc.ChannelCredentials:
    """Believes the mesh's CA and shows a certificate of `authority`."""
    certificate, key = authority.issue(WORKER, valid)
    return grpc.ssl_channel_credentials(mesh.pem, key, certificate)


def secure(service: Service, credentials: grpc.ChannelCredentials) -> grpc.aio.Channel:
    return grpc.aio.secure_channel(
        service.address, credentials, options=[("grpc.ssl_target_name_override", "cache.shoal")]
    )


@pytest.mark.parametrize("identity", CALLERS)
async def test_an_identity_with_business_there_is_answered(identity: str, service: Service, folder: Path) -> None:
    assert await stats(connect(service.address, Tls(folder, identity), CACHE)) == 1


async def test_streams_pass_whole(service: Service, folder: Path) -> None:
    async with connect(service.address, Tls(folder, WORKER), CACHE) as channel:
        chunks = [
            chunk async for chunk in cache_pb2_grpc.CacheServiceStub(channel).Get(cache_pb2.GetRequest(), timeout=5)
        ]
    assert len(chunks) == 2


async def test_replicas_at_other_addresses_share_one_certificate(service: Service, folder: Path) -> None:
    async with serving(folder) as replica:
        for address in (service.address, replica.address, replica.address.replace("127.0.0.1", "localhost")):
            assert await stats(connect(address, Tls(folder, WORKER), CACHE)) == 1


async def test_a_certificate_of_the_ca_without_business_there_is_denied_with_words_and_counted(
    service: Service, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        error = await refusal(connect(service.address, Tls(folder, GATEWAY), CACHE))
    meant = error_of(error)
    assert isinstance(meant, PermissionDenied)
    assert meant.message == "gateway.shoal may not call this service; operator.shoal, worker.shoal may"
    assert service.refused("gateway") == 1
    assert "refused /shoal.cache.v1.CacheService/Stats to gateway" in caplog.text
    assert await stats(connect(service.address, Tls(folder, WORKER), CACHE)) == 1


async def test_a_stream_without_business_there_is_denied_too(service: Service, folder: Path) -> None:
    async with connect(service.address, Tls(folder, GATEWAY), CACHE) as channel:
        call = cache_pb2_grpc.CacheServiceStub(channel).Get(cache_pb2.GetRequest(), timeout=5)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
    assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_reflection_is_for_those_with_business_and_health_for_every_certificate_of_the_ca(
    service: Service, folder: Path
) -> None:
    async with connect(service.address, Tls(folder, GATEWAY), CACHE) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        answer = await health.Check(health_pb2.HealthCheckRequest(service="live"), timeout=5)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([request]), timeout=5)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_a_method_that_is_not_there_is_unimplemented(service: Service, folder: Path) -> None:
    async with connect(service.address, Tls(folder, WORKER), CACHE) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await channel.unary_unary("/shoal.cache.v1.CacheService/Nothing")(b"", timeout=5)
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


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


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_key_that_may_not_be_read_is_named(folder: Path) -> None:
    (folder / "worker.key").chmod(0)
    with pytest.raises(TlsError, match=r"worker\.key: Permission denied"):
        Tls(folder, WORKER)


def test_only_certificates_that_end_within_a_fortnight_are_warned_of() -> None:
    day = 86_400.0
    sentences = list(ending_soon({"a.pem": 13 * day, "b.pem": 15 * day, "c.pem": -1.0}, now=0.0))
    assert len(sentences) == 2
    assert "a.pem ends in 13.0 days" in sentences[0]
    assert "c.pem has expired" in sentences[1]


async def test_the_end_of_a_certificate_is_a_metric_and_near_its_end_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, eventually: Callable[..., Awaitable[object]]
) -> None:
    soon = Validity.days(3)
    write(tmp_path, WORKER, Authority(NOW), soon)
    registry = CollectorRegistry()
    reminding = asyncio.ensure_future(Expiry(Tls(tmp_path, WORKER), registry).remind())
    await eventually(lambda: "worker.pem ends in 3.0 days" in caplog.text)
    assert "ca.pem" not in caplog.text
    ends = registry.get_sample_value("shoal_tls_certificate_expires_timestamp_seconds", {"file": "worker.pem"})
    assert ends == int(soon.end.timestamp())
    reminding.cancel()
