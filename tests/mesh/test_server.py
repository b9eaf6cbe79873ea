"""A server of the mesh: truthful health, pings that are welcome, and a drain that cuts nothing it need not cut."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from mesh.client import Backoff, connect
from mesh.errors import Unavailable, error_of
from mesh.server import Server
from mesh.settings import SettingsError
from shoal.cache.v1 import cache_pb2, cache_pb2_grpc
from shoal.channel import KEEPALIVE_TIME_MS, channel_options, server_options

NAME = "shoal.cache.v1.CacheService"


class SlowCache(cache_pb2_grpc.CacheServiceServicer):
    """Answers Stats when told to."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.started = asyncio.Event()
        self.server: Server

    async def Stats(self, request: cache_pb2.StatsRequest, context: grpc.aio.ServicerContext) -> cache_pb2.StatsReply:
        async with self.server.in_flight.rpc(context):
            self.started.set()
            await self.go.wait()
            return cache_pb2.StatsReply(hits=1)


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[Server, SlowCache, grpc.aio.Channel]]:
    cache = SlowCache()
    server = Server({NAME: lambda s: cache_pb2_grpc.add_CacheServiceServicer_to_server(cache, s)})
    cache.server = server
    port = await server.start("127.0.0.1", 0)
    try:
        async with connect(f"127.0.0.1:{port}") as channel:
            yield server, cache, channel
    finally:
        cache.go.set()
        await server.drain(1)


async def health(channel: grpc.aio.Channel, service: str = "") -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)).status


async def test_health_says_serving_only_once_it_was_told_so() -> None:
    async with serving() as (server, _, channel):
        assert await health(channel) == health_pb2.HealthCheckResponse.NOT_SERVING
        await server.set_serving(True)
        assert await health(channel) == health_pb2.HealthCheckResponse.SERVING
        assert await health(channel, NAME) == health_pb2.HealthCheckResponse.SERVING
        await server.set_serving(False)
        assert await health(channel, NAME) == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_reflection_lists_the_services() -> None:
    async with serving() as (_, _, channel):
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        async for answer in stub.ServerReflectionInfo(iter([request]), timeout=5):
            names = {service.name for service in answer.list_services_response.service}
        assert {NAME, "grpc.health.v1.Health"} <= names


async def test_a_drain_lets_running_calls_end_and_refuses_new_ones_with_a_cause(
    eventually: Callable[..., Awaitable[object]],
) -> None:
    async with serving() as (server, cache, channel):
        await server.set_serving(True)
        stub = cache_pb2_grpc.CacheServiceStub(channel)
        running = asyncio.ensure_future(stub.Stats(cache_pb2.StatsRequest(), timeout=10))
        await cache.started.wait()
        draining = asyncio.ensure_future(server.drain(10))
        await eventually(lambda: server.in_flight.draining)
        assert await health(channel) == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            # Retried by policy within the drain, and refused each time.
            await stub.Stats(cache_pb2.StatsRequest(), timeout=5)
        error = error_of(refused.value)
        assert isinstance(error, Unavailable)
        assert error.code == "draining"
        cache.go.set()
        assert (await running).hits == 1
        assert await draining is True


async def test_a_drain_cuts_what_is_left_when_its_time_is_over() -> None:
    async with serving() as (server, cache, channel):
        stub = cache_pb2_grpc.CacheServiceStub(channel)
        running = asyncio.ensure_future(stub.Stats(cache_pb2.StatsRequest(), timeout=10))
        await cache.started.wait()
        assert await server.drain(0.1) is False
        with pytest.raises(grpc.aio.AioRpcError):
            await running


async def test_two_servers_do_not_share_a_port() -> None:
    first, second = Server({}), Server({})
    port = await first.start("127.0.0.1", 0)
    try:
        with pytest.raises(SettingsError, match=str(port)):
            await second.start("127.0.0.1", port)
    finally:
        await first.drain(0)


async def test_a_client_that_pings_all_the_time_is_not_sent_away() -> None:
    """Ten idle minutes in little: pings every 50 ms against the server's allowance in the same proportion (B20)."""
    options = dict(server_options())
    allowed_ms = options["grpc.http2.min_recv_ping_interval_without_data_ms"]
    assert allowed_ms < KEEPALIVE_TIME_MS, "the server would take the mesh's own pings for abuse"
    cache = SlowCache()
    cache.server = Server({NAME: lambda s: cache_pb2_grpc.add_CacheServiceServicer_to_server(cache, s)})
    port = await cache.server.start("127.0.0.1", 0)
    fast = [*(dict(channel_options()) | {"grpc.keepalive_time_ms": 50}).items()]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=fast) as channel:
        stub = cache_pb2_grpc.CacheServiceStub(channel)
        silent = asyncio.ensure_future(stub.Stats(cache_pb2.StatsRequest(), timeout=30))
        await cache.started.wait()
        # gRPC sends about one a second and lets two strikes pass: by default the third ends the connection after 4.3 s.
        done, _ = await asyncio.wait([silent], timeout=6)
        assert not done, "the connection was closed while the call was silent"
        cache.go.set()
        assert (await silent).hits == 1
    await cache.server.drain(1)


def test_backoff_grows_with_jitter_up_to_its_limit_and_starts_again() -> None:
    backoff = Backoff(first_s=0.1, most_s=1.0)
    waits = [backoff.next_s() for _ in range(20)]
    assert all(0.05 <= wait <= 1.0 for wait in waits)
    assert max(waits[5:]) > 0.2
    backoff.reset()
    assert backoff.next_s() <= 0.1
