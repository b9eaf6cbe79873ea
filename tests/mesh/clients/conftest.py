"""A cache service that plays by script, and a client of it that remembers what it told."""

import asyncio
import contextlib
import itertools
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest

from mesh.breaker import BreakerPolicy
from mesh.clients.cache import CacheBudgets, Caches
from mesh.errors import errors_as_status
from mesh.kv import Bundle, KeySet, KvGeometry
from mesh.kv_wire import Assembly, pieces_of
from mesh.server import Server
from shoal.cache.v1 import cache_pb2 as pb
from shoal.cache.v1 import cache_pb2_grpc

GEOMETRY = KvGeometry("fp16", block_tokens=16, layers=2, kv_heads=1, head_dim=8)
LARGE = KvGeometry("fp32", block_tokens=16, layers=61, kv_heads=8, head_dim=64)  # several pieces
NAMESPACE = b"n" * 16
PATIENT = CacheBudgets(match_s=20, stall_s=20, take_s=20, fetch_s=60, store_s=60)
HASTY = CacheBudgets(match_s=0.3, stall_s=0.3, take_s=0.3, fetch_s=20, store_s=20)
QUICK = BreakerPolicy(failures=3, open_s=0.02, open_most_s=0.05)
SHUT = BreakerPolicy(failures=3, open_s=60, open_most_s=60)


def bundles(count: int, geometry: KvGeometry = GEOMETRY) -> list[Bundle]:
    return [Bundle.of(bytes([n]) * 16, NAMESPACE, geometry, os.urandom(geometry.bundle_bytes)) for n in range(count)]


def keys_of(found: list[Bundle]) -> KeySet:
    return KeySet(NAMESPACE, tuple(each.key for each in found), found[0].geometry)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 (a state of the peer's, which has no event)
            await asyncio.sleep(0.005)


async def endless() -> None:
    await asyncio.Event().wait()


class Scripted(cache_pb2_grpc.CacheServiceServicer):
    """A cache that holds `held`; a test may replace what it does."""

    def __init__(self) -> None:
        self.held: dict[bytes, Bundle] = {}
        self.calls: Counter[str] = Counter()
        self.running = 0
        self.cancelled = 0
        self.match: Callable[[pb.MatchRequest], Any] | None = None
        self.get: Callable[[pb.GetRequest, Any], AsyncIterator[pb.Chunk]] | None = None
        self.put: Callable[[AsyncIterator[pb.Chunk]], Any] | None = None
        self.stats: Callable[[], Any] | None = None

    def add_to(self, server: grpc.aio.Server) -> None:
        cache_pb2_grpc.add_CacheServiceServicer_to_server(self, server)

    @contextlib.asynccontextmanager
    async def _call(self, name: str, context: Any) -> AsyncIterator[None]:
        self.calls[name] += 1
        self.running += 1
        try:
            async with errors_as_status(context):
                yield
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1

    async def Match(self, request: pb.MatchRequest, context: Any) -> pb.MatchReply:
        async with self._call("match", context):
            if self.match is not None:
                return await self.match(request)
            asked = [request.keys.keys[at : at + 16] for at in range(0, len(request.keys.keys), 16)]
            return pb.MatchReply(leading_blocks=len(list(itertools.takewhile(self.held.__contains__, asked))))

    async def Get(self, request: pb.GetRequest, context: Any) -> AsyncIterator[pb.Chunk]:
        async with self._call("get", context):
            if self.get is not None:
                async for chunk in self.get(request, context):
                    await context.write(chunk)
                return
            for at in range(0, len(request.keys.keys), 16):
                bundle = self.held.get(request.keys.keys[at : at + 16])
                if bundle is None:
                    return
                for piece in pieces_of(bundle):
                    await context.write(piece)
        for nothing in ():
            yield nothing

    async def Put(self, request_iterator: AsyncIterator[pb.Chunk], context: Any) -> pb.PutReply:
        async with self._call("put", context):
            if self.put is not None:
                return await self.put(request_iterator)
            stored, assembly = 0, None
            async for chunk in request_iterator:
                if assembly is None:
                    assembly = Assembly(chunk, 2**30)
                else:
                    assembly.add(chunk)
                if assembly.whole:
                    bundle, assembly = assembly.bundle(), None
                    self.held[bundle.key] = bundle
                    stored += 1
            return pb.PutReply(stored=stored)

    async def Stats(self, request: pb.StatsRequest, context: Any) -> pb.StatsReply:
        async with self._call("stats", context):
            if self.stats is not None:
                await self.stats()
            return pb.StatsReply()


@contextlib.asynccontextmanager
async def played(port: int = 0) -> AsyncIterator[tuple[Scripted, str, Server]]:
    peer = Scripted()
    server = Server({"shoal.cache.v1.CacheService": peer.add_to})
    bound = await server.start("127.0.0.1", port)
    try:
        yield peer, f"127.0.0.1:{bound}", server
    finally:
        await server.drain(0)


class Using:
    """A client, and what it told."""

    def __init__(self, caches: Caches, told: list[tuple[str, str]]) -> None:
        self.caches = caches
        self.told = told

    async def fetched(self, keys: KeySet) -> list[Bundle]:
        return [bundle async for bundle in self.caches.fetch(keys)]


@contextlib.asynccontextmanager
async def using(
    targets: str, budgets: CacheBudgets = PATIENT, breaker: BreakerPolicy = SHUT, *, ready: bool = True
) -> AsyncIterator[Using]:
    told: list[tuple[str, str]] = []
    caches = Caches(targets, lambda operation, outcome: told.append((operation, str(outcome))), budgets, breaker)
    running = asyncio.create_task(caches.run())
    try:
        await until(lambda: caches.available or not ready)
        yield Using(caches, told)
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


@pytest.fixture
async def peer() -> AsyncIterator[Scripted]:
    async with played() as (scripted, address, _):
        scripted.address = address
        yield scripted
