"""Certificates of a mesh, and a cache service that runs with them."""

import datetime
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from prometheus_client import CollectorRegistry

from mesh.callers import OnlyFrom
from mesh.cli.authority import Authority, Validity
from mesh.server import Server
from mesh.tls import CACHE, GATEWAY, OPERATOR, WORKER, Tls
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
