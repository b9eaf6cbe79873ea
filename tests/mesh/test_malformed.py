"""Bytes that are no message are refused in words, by all four kinds of call, and nothing is logged."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from mesh.client import connect
from mesh.errors import errors_as_status
from mesh.server import Server
from shoal.cache.v1 import cache_pb2, cache_pb2_grpc
from shoal.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc

CACHE = "shoal.cache.v1.CacheService"
SCHEDULER = "shoal.scheduler.v1.SchedulerService"
GARBAGE = b"\xff\xff\xff"
Context = grpc.aio.ServicerContext[Any, Any]


class Cache(cache_pb2_grpc.CacheServiceServicer):
    async def Stats(self, request: cache_pb2.StatsRequest, context: Context) -> cache_pb2.StatsReply:
        return cache_pb2.StatsReply(hits=7)

    async def Get(self, request: cache_pb2.GetRequest, context: Context) -> AsyncIterator[cache_pb2.Chunk]:
        yield cache_pb2.Chunk()
        yield cache_pb2.Chunk()

    async def Put(self, request_iterator: AsyncIterator[cache_pb2.Chunk], context: Context) -> cache_pb2.PutReply:
        async with errors_as_status(context):
            async for _ in request_iterator:
                pass
        return cache_pb2.PutReply()


class Scheduler(scheduler_pb2_grpc.SchedulerServiceServicer):
    async def Acquire(
        self, request_iterator: AsyncIterator[scheduler_pb2.LeaseEvent], context: Context
    ) -> AsyncIterator[scheduler_pb2.Grant]:
        async with errors_as_status(context):
            async for _ in request_iterator:
                yield scheduler_pb2.Grant()


@pytest.fixture
async def channel() -> AsyncIterator[grpc.aio.Channel]:
    server = Server(
        {
            CACHE: lambda s: cache_pb2_grpc.add_CacheServiceServicer_to_server(Cache(), s),
            SCHEDULER: lambda s: scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(Scheduler(), s),
        }
    )
    port = await server.start("127.0.0.1", 0)
    async with connect(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.drain(1)


async def stream_of(*messages: bytes) -> AsyncIterator[bytes]:
    for message in messages:
        yield message


Send = Callable[[grpc.aio.Channel, bytes], Any]
REFLECTION = "grpc.reflection.v1alpha.ServerReflection"

# The message that is broken, and one call of each kind that sends it.
CALLS: dict[str, Send] = {
    "shoal.cache.v1.StatsRequest": lambda channel, raw: channel.unary_unary(f"/{CACHE}/Stats")(raw, timeout=5),
    "shoal.cache.v1.GetRequest": lambda channel, raw: channel.unary_stream(f"/{CACHE}/Get")(raw, timeout=5).read(),
    "shoal.cache.v1.Chunk": lambda channel, raw: channel.stream_unary(f"/{CACHE}/Put")(stream_of(b"", raw), timeout=5),
    "shoal.scheduler.v1.LeaseEvent": lambda channel, raw: channel.stream_stream(f"/{SCHEDULER}/Acquire")(
        stream_of(raw), timeout=5
    ).read(),
    # gRPC's own services: a coroutine that writes its stream, and a handler that knows no error of ours.
    "grpc.health.v1.HealthCheckRequest": lambda channel, raw: channel.unary_stream("/grpc.health.v1.Health/Watch")(
        raw, timeout=5
    ).read(),
    "grpc.reflection.v1alpha.ServerReflectionRequest": lambda channel, raw: channel.stream_stream(
        f"/{REFLECTION}/ServerReflectionInfo"
    )(stream_of(raw), timeout=5).read(),
}


@pytest.mark.parametrize("name", CALLS)
async def test_garbage_is_an_invalid_argument_that_names_the_message(
    channel: grpc.aio.Channel, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    send = CALLS[name]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await send(channel, GARBAGE)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == f"the message is not a valid {name}"
    assert caplog.records == []
    await send(channel, b"")


async def test_good_messages_are_answered_as_ever(channel: grpc.aio.Channel) -> None:
    cache = cache_pb2_grpc.CacheServiceStub(channel)
    assert (await cache.Stats(cache_pb2.StatsRequest(), timeout=5)).hits == 7
    assert len([chunk async for chunk in cache.Get(cache_pb2.GetRequest(), timeout=5)]) == 2
    watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service="live"), timeout=5)
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    watch.cancel()


async def test_an_unknown_method_is_still_unimplemented(channel: grpc.aio.Channel) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await channel.unary_unary(f"/{CACHE}/Wings")(GARBAGE, timeout=5)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
