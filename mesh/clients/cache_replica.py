"""One replica of the cold cache, and one operation on it: what each ending means, and whom it is held against.

The words are `Outcome`'s. Trouble that the next request would meet, too, shuts the replica's breaker at once; trouble
with an answer does so when it comes several times in a row; the caller's own slowness or change of mind never does.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from enum import StrEnum
from types import TracebackType
from typing import Self

import grpc

from mesh.breaker import Breaker, BreakerPolicy
from mesh.client import connect
from mesh.errors import InvalidRequest, error_of
from mesh.tls import CACHE, Tls
from shoal.cache.v1 import cache_pb2, cache_pb2_grpc

# After a replica is gone, or its channel is renewed: seconds that its calls may still take.
GOODBYE_S = 1.0

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


class Replica:
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


class Attempt:
    """One operation on one replica: `with` it, and no trouble of the service leaves the block.

    `outcome` is what is told; whoever ends well sets it.
    """

    def __init__(self, replica: Replica, operation: str, told: Callable[[str, str], None]) -> None:
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
