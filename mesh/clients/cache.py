"""The cold KV cache as a worker sees it: something that may help and can do no harm.

No trouble with the service raises here. Absent, refusing, silent, slow, dying in mid-transfer or lying: each is a miss
within a small time budget and is told by a word of its own (`Outcome`). A replica in trouble is left alone until a
probe in the background finds it well, so a dead service costs one budget once and not every request. Replicas are
stateless: any of them serves any key.
"""

import asyncio
import logging
import random
import time
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType
from typing import Self

import grpc

from mesh.breaker import Breaker, BreakerPolicy
from mesh.client import connect
from mesh.discovery import addresses
from mesh.errors import InvalidRequest, error_of
from mesh.kv import Bundle, KeySet
from mesh.kv_wire import Assembly, check_wanted, key_set_message, pieces_of
from mesh.telemetry import trace_metadata
from mesh.tls import CACHE, Tls
from shoal.cache.v1 import cache_pb2, cache_pb2_grpc

# After a replica is gone from the list, or `run` ends: seconds that its calls may still take.
GOODBYE_S = 1.0
# After a write has failed: seconds until gRPC has read the status that explains it. It says INTERNAL until then.
STATUS_S = 0.05
BREAKER = BreakerPolicy()

Bundles = Iterable[Bundle] | AsyncIterable[Bundle]

log = logging.getLogger("shoal.cache")


class Outcome(StrEnum):
    """How one operation ended, for metrics."""

    OK = "ok"  # all that was asked for
    MISS = "miss"  # the service does not hold the next key, or refused to store some
    OFF = "off"  # no service is configured
    OPEN = "open"  # every replica is in trouble or not there: nothing was sent
    UNREACHABLE = "unreachable"  # nobody answers there, or it is shutting down
    SILENT = "silent"  # it did not answer in time
    DIED = "died"  # it broke off in mid-transfer
    REFUSED = "refused"  # it answered with an error: our request, or its limits
    MISMATCH = "mismatch"  # it sent what was not asked for, or damaged
    LATE = "late"  # its whole time was over, which may be the caller's own slowness
    CANCELLED = "cancelled"  # the caller wanted no more


# Trouble that the next request would meet, too, and trouble that counts up.
_AT_ONCE = frozenset({Outcome.UNREACHABLE, Outcome.SILENT, Outcome.DIED})
_COUNTED = frozenset({Outcome.REFUSED, Outcome.MISMATCH})


@dataclass(frozen=True, slots=True)
class CacheBudgets:
    """The longest that anything here may take."""

    match_s: float = 0.25  # one Match, or one probe
    stall_s: float = 0.5  # silence of the service before a piece of a Get
    take_s: float = 5.0  # silence of the service before it takes a piece of a Put, or answers it
    fetch_s: float = 10.0  # one Get as a whole, its reader's own time included
    store_s: float = 20.0  # one Put as a whole, its source's own time included


class _Replica:
    """One replica: its channel, its breaker and how many calls run there."""

    def __init__(self, address: str, policy: BreakerPolicy, tls: Tls | None) -> None:
        self.address = address
        self._tls = tls
        self._connect()
        self.breaker = Breaker(policy)
        self.calls = 0
        self.in_trouble = asyncio.Event()
        # Nobody has heard of it yet: the first probe decides, at once.
        self.breaker.closed = False
        self.in_trouble.set()

    def _connect(self) -> None:
        self._pems = self._tls.current() if self._tls is not None else None
        self.channel = connect(self.address, self._tls, CACHE)
        self.stub = cache_pb2_grpc.CacheServiceStub(self.channel)

    async def _renew(self) -> None:
        """A channel keeps the certificates that it was made with; if there are newer ones, take those."""
        if self._tls is not None and self._tls.current() is not self._pems:
            former = self.channel
            self._connect()
            await former.close(GOODBYE_S)

    def failed(self, operation: str, *, at_once: bool) -> None:
        self.breaker.failed(operation, time.monotonic(), at_once=at_once)
        if not self.breaker.closed:
            self.in_trouble.set()

    async def heal(self, budget_s: float) -> None:
        """Until cancelled: while it is in trouble, ask again and again whether it is there."""
        while True:
            await self.in_trouble.wait()
            await asyncio.sleep(max(0.0, self.breaker.probe_at_s - time.monotonic()))
            await self._renew()
            well = await self._answers(budget_s)
            self.breaker.probed(well, time.monotonic())
            if well:
                log.info("cache %s answers", self.address)
                self.in_trouble.clear()

    async def _answers(self, budget_s: float) -> bool:
        try:
            await self.stub.Stats(cache_pb2.StatsRequest(), timeout=budget_s)
        except grpc.aio.AioRpcError as error:
            log.debug("cache %s: %s %s", self.address, error.code().name, error.details())
            return False
        return True


class _Attempt:
    """One operation on one replica: `with` it, and no trouble of the service leaves the block.

    `outcome` is what is told; whoever ends well sets it.
    """

    def __init__(self, replica: _Replica, operation: str, told: Callable[[str, str], None]) -> None:
        self.replica = replica
        self.outcome = Outcome.CANCELLED
        self.heard = False
        # While the caller's own code runs in here: what it raises is its own.
        self.with_caller = False
        self._operation = operation
        self._told = told

    def __enter__(self) -> Self:
        self.replica.calls += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self.replica.calls -= 1
        found = self._judge(error)
        outcome = found or self.outcome
        if outcome in _AT_ONCE or outcome in _COUNTED:
            self.replica.failed(self._operation, at_once=outcome in _AT_ONCE)
            log.info("cache %s: %s is %s (%s)", self.replica.address, self._operation, outcome, _short(error))
        elif outcome in (Outcome.OK, Outcome.MISS):
            self.replica.breaker.succeeded(self._operation)
        self._told(self._operation, outcome)
        return found is not None

    def _judge(self, error: BaseException | None) -> Outcome | None:
        """The word for trouble with the service; None for what is none of its doing."""
        if self.with_caller:
            return None
        match error:
            case grpc.aio.AioRpcError():
                return self._judge_status(error)
            case TimeoutError():
                return Outcome.SILENT
            case InvalidRequest():
                return Outcome.MISMATCH
            case asyncio.CancelledError():
                # A call that was cancelled with its channel reads like a task that was; the task itself tells.
                task = asyncio.current_task()
                return Outcome.UNREACHABLE if task is not None and not task.cancelling() else None
        return None

    def _judge_status(self, error: grpc.aio.AioRpcError) -> Outcome:
        match error.code():
            case grpc.StatusCode.DEADLINE_EXCEEDED:
                return Outcome.SILENT if self._operation == "match" else Outcome.LATE
            case grpc.StatusCode.UNAVAILABLE:
                return Outcome.DIED if self.heard and error_of(error).code is None else Outcome.UNREACHABLE
        return Outcome.REFUSED


def _short(error: BaseException | None) -> str:
    return (error.details() or "") if isinstance(error, grpc.aio.AioRpcError) else str(error or "")


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
        self._replicas: dict[str, _Replica] = {}

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
        if not self._targets:
            return
        tasks: dict[str, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:
            async for found in addresses(self._targets):
                for gone in tasks.keys() - found:
                    tasks.pop(gone).cancel()
                for new in found - tasks.keys():
                    tasks[new] = group.create_task(self._keep(new), name=f"cache {new}")

    async def _keep(self, address: str) -> None:
        replica = _Replica(address, self._policy, self._tls)
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

    async def _bundle(self, call: "_Get", attempt: _Attempt, keys: KeySet, index: int) -> Bundle | None:
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

    async def _send(self, call: "_Put", bundles: Bundles, attempt: _Attempt) -> None:
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

    def _attempt(self, operation: str) -> _Attempt | None:
        """At the replica with the fewest calls among those that are well; None, and told, if none is."""
        well = [replica for replica in self._replicas.values() if replica.breaker.closed]
        if not well:
            self._told(operation, Outcome.OPEN if self._targets else Outcome.OFF)
            return None
        return _Attempt(min(well, key=lambda replica: (replica.calls, random.random())), operation, self._told)


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
