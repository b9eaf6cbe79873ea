"""The cold KV cache as a worker sees it: something that may help and can do no harm.

No trouble with the service raises here. Absent, refusing, silent, slow, dying in mid-transfer or lying: each is a miss
within a small time budget and is told by a word of its own (`Outcome`, in cache_replica.py). A replica in trouble is
left alone until a probe in the background finds it well, so a dead service costs one budget once and not every request.
Replicas are stateless: any of them serves any key.
"""

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass

import grpc

from mesh.breaker import BreakerPolicy
from mesh.clients.cache_replica import GOODBYE_S, Attempt, Outcome, Replica
from mesh.discovery import at_each
from mesh.errors import InvalidRequest
from mesh.kv import Bundle, KeySet
from mesh.kv_wire import Assembly, check_wanted, key_set_message, pieces_of
from mesh.telemetry import trace_metadata
from mesh.tls import Tls
from shoal.cache.v1 import cache_pb2

# After a write has failed: seconds until gRPC has read the status that explains it. It says INTERNAL until then.
STATUS_S = 0.05
BREAKER = BreakerPolicy()

Bundles = Iterable[Bundle] | AsyncIterable[Bundle]


@dataclass(frozen=True, slots=True)
class CacheBudgets:
    """The longest that anything here may take."""

    match_s: float = 0.25  # one Match, or one probe
    stall_s: float = 0.5  # silence of the service before a piece of a Get
    take_s: float = 5.0  # silence of the service before it takes a piece of a Put, or answers it
    fetch_s: float = 10.0  # one Get as a whole, its reader's own time included
    store_s: float = 20.0  # one Put as a whole, its source's own time included


class Caches:
    """Every replica behind `targets` (host:port, comma-separated; empty = no cold cache).

    `told(operation, outcome)` hears of every match, fetch and store once. Nothing is sent before `run` runs.
    """

    def __init__(
        self,
        targets: str,
        told: Callable[[str, str], None],
        budgets: CacheBudgets = CacheBudgets(),
        breaker: BreakerPolicy = BREAKER,
        tls: Tls | None = None,
    ) -> None:
        self._targets = targets
        self._tls = tls
        self._told = told
        self._budgets = budgets
        self._policy = breaker
        self._replicas: dict[str, Replica] = {}

    @property
    def available(self) -> bool:
        """Whether a replica would be asked now."""
        return bool(self.well)

    @property
    def well(self) -> list[str]:
        """Addresses of the replicas that may be asked."""
        return [address for address, replica in self._replicas.items() if replica.breaker.closed]

    async def run(self) -> None:
        """Until cancelled: know the replicas, and notice when one in trouble is well again."""
        if self._targets:
            await at_each(self._targets, self._keep, "cache")

    async def _keep(self, address: str) -> None:
        replica = Replica(address, self._policy, self._tls)
        self._replicas[address] = replica
        try:
            await replica.heal(self._budgets.match_s)
        finally:
            if self._replicas.get(address) is replica:
                del self._replicas[address]
            await replica.channel.close(GOODBYE_S)

    async def match(self, keys: KeySet) -> int:
        """How many leading blocks of `keys` the service holds; 0 within `match_s` when it does not say."""
        if not keys.keys or (attempt := self._attempt("match")) is None:
            return 0
        with attempt:
            request = cache_pb2.MatchRequest(keys=key_set_message(keys))
            stub = attempt.replica.stub
            reply = await stub.Match(request, timeout=self._budgets.match_s, metadata=trace_metadata())
            leading = reply.leading_blocks
            if leading > len(keys.keys):
                raise InvalidRequest(f"leading_blocks: {leading} of {len(keys.keys)} keys", field="leading_blocks")
            attempt.outcome = Outcome.OK if leading == len(keys.keys) else Outcome.MISS
            return leading
        return 0

    async def fetch(self, keys: KeySet) -> AsyncGenerator[Bundle, None]:
        """Verified bundles in the order of `keys`; ends early, without an error, at the first miss, damage or trouble.

        Close it (`contextlib.aclosing`) when leaving early, so that the rest is not sent.
        """
        if not keys.keys or (attempt := self._attempt("fetch")) is None:
            return
        with attempt:
            request = cache_pb2.GetRequest(keys=key_set_message(keys))
            call = attempt.replica.stub.Get(request, timeout=self._budgets.fetch_s, metadata=trace_metadata())
            try:
                for index in range(len(keys.keys)):
                    bundle = await self._bundle(call, attempt, keys, index)
                    if bundle is None:
                        attempt.outcome = Outcome.MISS
                        return
                    if index == len(keys.keys) - 1:
                        attempt.outcome = Outcome.OK
                    yield bundle
            finally:
                call.cancel()

    async def _bundle(self, call: "_Get", attempt: Attempt, keys: KeySet, index: int) -> Bundle | None:
        """Bundle number `index`; None if the stream ended before it."""
        first = await self._piece(call)
        if first is None:
            return None
        attempt.heard = True
        assembly = Assembly(first, keys.geometry.bundle_bytes)
        check_wanted(assembly.header, assembly.geometry, keys, index)
        while not assembly.whole:
            piece = await self._piece(call)
            if piece is None:
                raise assembly.cut("the stream ends")
            assembly.add(piece)
        return assembly.bundle()

    async def _piece(self, call: "_Get") -> cache_pb2.Chunk | None:
        async with asyncio.timeout(self._budgets.stall_s):
            piece = await call.read()
        return piece if isinstance(piece, cache_pb2.Chunk) else None

    async def store(self, bundles: Bundles) -> int:
        """Store bundles of one namespace and geometry; how many of them the service holds now.

        An error of the source itself is raised. The next bundle is asked for when the last has left.
        """
        if (attempt := self._attempt("store")) is None:
            return 0
        with attempt:
            call = attempt.replica.stub.Put(timeout=self._budgets.store_s, metadata=trace_metadata())
            try:
                await self._send(call, bundles, attempt)
                if call.time_remaining() == 0:
                    attempt.outcome = Outcome.LATE
                    return 0
                async with asyncio.timeout(self._budgets.take_s):
                    reply = await call
            finally:
                call.cancel()
            attempt.outcome = Outcome.MISS if reply.refused else Outcome.OK
            return reply.stored + reply.already_held
        return 0

    async def _send(self, call: "_Put", bundles: Bundles, attempt: Attempt) -> None:
        """Every piece, or as many as the service takes before it answers."""
        try:
            async with aclosing(_each(bundles)) as source:
                attempt.with_caller = True
                async for bundle in source:
                    attempt.with_caller = False
                    for piece in pieces_of(bundle):
                        async with asyncio.timeout(self._budgets.take_s):
                            await call.write(piece)
                    attempt.with_caller = True
                attempt.with_caller = False
            await call.done_writing()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            if attempt.with_caller:
                raise
            await asyncio.sleep(STATUS_S)

    def _attempt(self, operation: str) -> Attempt | None:
        """At the replica with the fewest calls among those that are well; None, and told, if none is."""
        well = [replica for replica in self._replicas.values() if replica.breaker.closed]
        if not well:
            self._told(operation, Outcome.OPEN if self._targets else Outcome.OFF)
            return None
        return Attempt(min(well, key=lambda replica: (replica.calls, random.random())), operation, self._told)


_Get = grpc.aio.UnaryStreamCall[cache_pb2.GetRequest, cache_pb2.Chunk]
_Put = grpc.aio.StreamUnaryCall[cache_pb2.Chunk, cache_pb2.PutReply]


async def _each(bundles: Bundles) -> AsyncGenerator[Bundle, None]:
    if isinstance(bundles, AsyncGenerator):
        async with aclosing(bundles):
            async for bundle in bundles:
                yield bundle
    elif isinstance(bundles, AsyncIterable):
        async for bundle in bundles:
            yield bundle
    else:
        for bundle in bundles:
            yield bundle
