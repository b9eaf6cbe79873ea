"""CacheService: turns protobuf into the cold store's calls and back; decides nothing."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc

from cache_service.cold import ColdStore, Written
from cache_service.limits import Limits
from cache_service.metrics import Metrics
from cache_service.receiving import Receiver
from cache_service.translate import keys_of
from mesh.errors import DeadlineExceeded
from mesh.kv import Bundle
from mesh.kv_wire import pieces_of
from mesh.server import AddService, InFlight
from shoal.cache.v1 import cache_pb2, cache_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]
NAME = cache_pb2.DESCRIPTOR.services_by_name["CacheService"].full_name
_NOTHING: tuple[cache_pb2.Chunk, ...] = ()


class CacheService(cache_pb2_grpc.CacheServiceServicer):
    """Serves one cold store."""

    def __init__(self, store: ColdStore, limits: Limits, metrics: Metrics, in_flight: InFlight) -> None:
        self._store = store
        self._limits = limits
        self._metrics = metrics
        self._in_flight = in_flight

    def registration(self) -> dict[str, AddService]:
        """For mesh.server.Server."""
        return {NAME: lambda server: cache_pb2_grpc.add_CacheServiceServicer_to_server(self, server)}

    async def Match(self, request: cache_pb2.MatchRequest, context: Context) -> cache_pb2.MatchReply:
        async with self._in_flight.rpc(context):
            with self._metrics.operation("match") as operation:
                keys = keys_of(request, self._limits)
                operation.keys = len(keys.keys)
                operation.hits = await self._store.leading(keys)
                operation.outcome = "ok"
                return cache_pb2.MatchReply(leading_blocks=operation.hits)

    async def Get(self, request: cache_pb2.GetRequest, context: Context) -> AsyncIterator[cache_pb2.Chunk]:
        # Writes through the context: what happens while a piece waits for its reader then happens here, and not to a
        # suspended generator that nobody resumes. It stays a generator, as interceptors want their streams.
        async with self._in_flight.rpc(context):
            with self._metrics.operation("get") as operation:
                keys = keys_of(request, self._limits)
                operation.keys = len(keys.keys)
                async with aclosing(self._store.read(keys)) as bundles:
                    async for bundle in bundles:
                        await self._send(bundle, context)
                        operation.hits += 1
                        operation.size += bundle.geometry.bundle_bytes
                        self._metrics.hit(bundle.geometry.bundle_bytes)
                operation.outcome = "ok" if operation.hits == operation.keys else "miss"
                self._metrics.missed(operation.keys - operation.hits)
        for chunk in _NOTHING:
            yield chunk

    async def _send(self, bundle: Bundle, context: Context) -> None:
        """Piece by piece, as fast as the reader takes them. Raises DeadlineExceeded if it takes none."""
        for piece in pieces_of(bundle):
            try:
                async with asyncio.timeout(self._limits.stall_s):
                    await context.write(piece)
            except TimeoutError:
                raise DeadlineExceeded(f"nothing was read for {self._limits.stall_s:g} s", code="stalled") from None

    async def Put(self, request_iterator: AsyncIterator[cache_pb2.Chunk], context: Context) -> cache_pb2.PutReply:
        count = dict.fromkeys(Written, 0)
        async with self._in_flight.rpc(context):
            with self._metrics.operation("put") as operation:
                async with self._store.puts.hold(1), aclosing(self._receive(request_iterator)) as bundles:
                    async for bundle in bundles:
                        written = await self._store.write(bundle)
                        size = bundle.geometry.bundle_bytes
                        count[written] += 1
                        operation.keys += 1
                        operation.hits += written is Written.HELD
                        operation.size += size
                        self._metrics.written(written, size if written is Written.STORED else 0)
                operation.outcome = "refused" if count[Written.REFUSED] else "ok"
        return cache_pb2.PutReply(
            stored=count[Written.STORED], already_held=count[Written.HELD], refused=count[Written.REFUSED]
        )

    def _receive(self, pieces: AsyncIterator[cache_pb2.Chunk]) -> AsyncGenerator[Bundle, None]:
        limits = self._limits
        return Receiver(pieces, limits.max_bundle_bytes, limits.stall_s, self._store.receiving).bundles()

    async def Stats(self, request: cache_pb2.StatsRequest, context: Context) -> cache_pb2.StatsReply:
        async with self._in_flight.rpc(context):
            tally = self._metrics.tally
            return cache_pb2.StatsReply(
                hits=tally.hits,
                misses=tally.misses,
                stored=tally.stored,
                refused=tally.refused,
                mismatches=tally.mismatches,
                bytes_read=tally.bytes_read,
                bytes_written=tally.bytes_written,
            )
