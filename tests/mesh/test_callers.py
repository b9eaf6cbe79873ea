"""Who of those that the CA has signed may call a service: the roles with business there."""

import logging
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from mesh.client import connect
from mesh.errors import PermissionDenied, error_of
from mesh.tls import CACHE, GATEWAY, WORKER, Tls
from shoal.cache.v1 import cache_pb2, cache_pb2_grpc

from .conftest import CALLERS, Service, refusal, stats


@pytest.mark.parametrize("identity", CALLERS)
async def test_an_identity_with_business_there_is_answered(identity: str, service: Service, folder: Path) -> None:
    assert await stats(connect(service.address, Tls(folder, identity), CACHE)) == 1


async def test_streams_pass_whole(service: Service, folder: Path) -> None:
    async with connect(service.address, Tls(folder, WORKER), CACHE) as channel:
        chunks = [
            chunk async for chunk in cache_pb2_grpc.CacheServiceStub(channel).Get(cache_pb2.GetRequest(), timeout=5)
        ]
    assert len(chunks) == 2


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
