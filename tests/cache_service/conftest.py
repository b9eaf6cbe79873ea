"""A real cache service in this process, over a real Valkey."""

import asyncio
import contextlib
import os
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace

import grpc
import pytest
from prometheus_client import CollectorRegistry

from cache_service.cold import ColdStore
from cache_service.limits import Limits
from cache_service.metrics import Metrics
from cache_service.redis_bundles import RedisBundles
from cache_service.service import CacheService
from mesh.client import connect
from mesh.kv import Bundle, KeySet, KvGeometry
from mesh.server import InFlight, Server
from shoal.cache.v1 import cache_pb2_grpc

GEOMETRY = KvGeometry("fp16", block_tokens=16, layers=2, kv_heads=1, head_dim=8)
LARGE = KvGeometry("fp32", block_tokens=16, layers=30, kv_heads=3, head_dim=64)
LIMITS = Limits(
    max_keys=1000, max_bundle_bytes=8 * 2**20, held_bytes=16 * 2**20, room_s=5, stall_s=30, connections=8, puts=64
)
# Long enough that a busy machine is no dead Redis; tests that wait for it say so.
PATIENT_S = 10.0


@dataclass
class Running:
    """One service, and the way to it."""

    store: ColdStore
    registry: CollectorRegistry
    stub: cache_pb2_grpc.CacheServiceStub
    channel: grpc.aio.Channel
    in_flight: InFlight
    port: int

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"shoal_cache_{name}", labels) or 0.0


Serving = Callable[..., contextlib.AbstractAsyncContextManager[Running]]


@contextlib.asynccontextmanager
async def serving(
    url: str,
    *,
    timeout_s: float = PATIENT_S,
    ttl_s: float = 600,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    **limits: float,
) -> AsyncIterator[Running]:
    own, registry, in_flight = replace(LIMITS, **limits), CollectorRegistry(), InFlight()
    metrics = Metrics(registry)
    async with contextlib.aclosing(RedisBundles(url, timeout_s, ttl_s)) as redis:
        store = ColdStore(redis, own, metrics)
        server = Server(CacheService(store, own, metrics, in_flight).registration(), interceptors, in_flight)
        port = await server.start("127.0.0.1", 0)
        ready = asyncio.Event()

        async def tell(well: bool) -> None:
            await server.set_serving(well)
            ready.set()

        watching = asyncio.create_task(store.watch(tell))
        try:
            async with connect(f"127.0.0.1:{port}") as channel:
                await ready.wait()
                yield Running(store, registry, cache_pb2_grpc.CacheServiceStub(channel), channel, in_flight, port)
        finally:
            watching.cancel()
            await server.drain(0)


@pytest.fixture
def serve() -> Serving:
    """`async with serve(url, **limits) as running`."""
    return serving


@pytest.fixture
async def running(valkey: str) -> AsyncIterator[Running]:
    async with serving(valkey) as found:
        yield found


Make = Callable[..., list[Bundle]]


@pytest.fixture
def make() -> Make:
    """`make(count)` bundles of one chain in a namespace of its own."""

    def bundles(count: int, geometry: KvGeometry = GEOMETRY, namespace: bytes | None = None) -> list[Bundle]:
        namespace = namespace or secrets.token_bytes(16)
        return [
            Bundle.of(secrets.token_bytes(16), namespace, geometry, os.urandom(geometry.bundle_bytes))
            for _ in range(count)
        ]

    return bundles


@pytest.fixture
def keys() -> Callable[[list[Bundle]], KeySet]:
    """The key set that asks for these bundles."""
    return lambda bundles: KeySet(bundles[0].namespace, tuple(each.key for each in bundles), bundles[0].geometry)
