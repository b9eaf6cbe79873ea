"""A cache service of the contract, in memory, for tests to hurt; and two real workers of a tiny model that share it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc
import pytest
import pytest_asyncio

from shoal.cache.v1 import cache_pb2, cache_pb2_grpc

# Budgets that a busy machine keeps: those who test that they are kept to name smaller ones. What is computed is stored
# at once, for those who test what comes of it; test_second_sight.py has what is stored by default.
SETTINGS = {"cold_share": 1000.0, "cold_match_ms": 5000, "cold_stall_ms": 5000, "cold_store_after": 1}


class MemoryCache(cache_pb2_grpc.CacheServiceServicer):
    """Holds single-piece bundles. `held` and `sent` are storage keys; the rest is how it misbehaves."""

    def __init__(self) -> None:
        self.held: dict[bytes, cache_pb2.Chunk] = {}
        self.sent: list[bytes] = []
        self.gets = 0  # under way
        self.late_s = 0.0  # before every answer but Stats
        self.dies_after = 1 << 30  # bundles of one Get
        self.flips_a_bit = False
        self.open = asyncio.Event()  # Get waits for it before its second bundle
        self.open.set()

    def holds(self, keys: Any, kv_dtype: str) -> bool:
        return all(key + kv_dtype.encode() in self.held for key in keys)

    def behave(self) -> None:
        """As at first; what is held stays."""
        self.late_s, self.dies_after, self.flips_a_bit = 0.0, 1 << 30, False
        self.open.set()
        self.sent.clear()

    def _found(self, keys: cache_pb2.KeySet) -> list[cache_pb2.Chunk]:
        found = []
        for at in range(0, len(keys.keys), 16):
            chunk = self.held.get(keys.keys[at : at + 16] + keys.kv_dtype.encode())
            if chunk is None or chunk.header.namespace != keys.namespace:
                break
            found.append(chunk)
        return found

    async def Match(self, request: cache_pb2.MatchRequest, context: Any) -> cache_pb2.MatchReply:
        await asyncio.sleep(self.late_s)
        return cache_pb2.MatchReply(leading_blocks=len(self._found(request.keys)))

    async def Get(self, request: cache_pb2.GetRequest, context: Any) -> AsyncIterator[cache_pb2.Chunk]:
        await asyncio.sleep(self.late_s)
        self.gets += 1
        try:
            for count, chunk in enumerate(self._found(request.keys)):
                if count == self.dies_after:
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
                if count:
                    await self.open.wait()
                self.sent.append(chunk.header.key)
                yield _flipped(chunk) if self.flips_a_bit else chunk
        finally:
            self.gets -= 1

    async def Put(self, chunks: AsyncIterator[cache_pb2.Chunk], context: Any) -> cache_pb2.PutReply:
        await asyncio.sleep(self.late_s)
        reply = cache_pb2.PutReply()
        async for chunk in chunks:
            self.held[chunk.header.key + chunk.header.kv_dtype.encode()] = chunk
            reply.stored += 1
        return reply

    async def Stats(self, request: cache_pb2.StatsRequest, context: Any) -> cache_pb2.StatsReply:
        return cache_pb2.StatsReply()


def _flipped(chunk: cache_pb2.Chunk) -> cache_pb2.Chunk:
    damaged = cache_pb2.Chunk()
    damaged.CopyFrom(chunk)
    damaged.payload = bytes([chunk.payload[0] ^ 1]) + chunk.payload[1:]
    return damaged


@asynccontextmanager
async def _listening(cache: MemoryCache, port: int = 0) -> AsyncIterator[int]:
    server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
    cache_pb2_grpc.add_CacheServiceServicer_to_server(cache, server)
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield bound
    finally:
        await server.stop(None)


@dataclass
class Told:
    """An answer to its end."""

    ids: list[int] = field(default_factory=list)
    cached: dict[int, int] = field(default_factory=dict)
    phases: list[int] = field(default_factory=list)
    reason: int = 0
    first_s: float = 0.0
    came_at: list[float] = field(default_factory=list)  # of each message with tokens, and how many
    counts: list[int] = field(default_factory=list)
    usage: Any = None

    def tokens_per_s(self, since: float = 0.0, until: float = 1e18) -> float:
        """How fast tokens came between two times of the event loop; by default in the whole of the answer."""
        since, until = max(since, self.came_at[0]), min(until, self.came_at[-1])
        came = sum(n for at, n in zip(self.came_at, self.counts, strict=True) if since < at <= until)
        return came / (until - since)


async def _ask(rig: Any, **fields: Any) -> Told:
    loop = asyncio.get_running_loop()
    told, began = Told(), loop.time()
    async for response in rig.stub.Generate(rig.request(**fields), timeout=30):
        match response.WhichOneof("event"):
            case "tokens":
                now = loop.time()
                told.first_s = told.first_s or now - began
                told.came_at.append(now)
                told.counts.append(len(response.tokens.ids))
                told.ids += response.tokens.ids
            case "progress":
                told.phases.append(response.progress.phase)
            case "finished":
                told.reason, told.usage = response.finished.reason, response.finished.usage
                told.cached = {part.tier: part.tokens for part in told.usage.cached}
    return told


@pytest.fixture(scope="session")
def ask() -> Callable[..., Any]:
    """`await ask(rig, prompt_ids=..., ...)`: one answer, to its end."""
    return _ask


@pytest.fixture(scope="session")
def listening() -> Callable[..., Any]:
    """`async with listening(cache, port) as port`: a MemoryCache on a port of this machine."""
    return _listening


@dataclass
class Pair:
    """Two workers and what they share."""

    first: Any
    second: Any
    cache: MemoryCache
    own_worker: Callable[..., Any]


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def workers(own_worker: Callable[..., Any], ready: Callable[..., Any]) -> AsyncIterator[Pair]:
    cache = MemoryCache()
    async with _listening(cache) as port:
        own = partial(own_worker, **SETTINGS, caches=f"127.0.0.1:{port}")
        async with own(worker_id="first") as first, own(worker_id="second") as second:
            await ready(first)
            await ready(second)
            yield Pair(first, second, cache, own)


@pytest.fixture
def pair(workers: Pair) -> AsyncIterator[Pair]:
    """Two workers whose cache service behaves, until the test says otherwise."""
    workers.cache.behave()
    yield workers
    workers.cache.behave()
