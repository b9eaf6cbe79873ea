"""A lease: one request's place at a scheduler, kept through the loss of schedulers.

The Acquire RPC's lifetime is the lease. While the request is queued, a lost scheduler means opening again (here or at
another replica) with the age it has. While it runs on a worker, nobody waits for the scheduler: the loss is noticed by
a callback, and another replica adopts the request in the background; the token stream does not notice.
"""

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from msgspec.structs import replace

from mesh.client import Backoff
from mesh.clients import placement
from mesh.clients.dialogue import Dialogue, Lost
from mesh.clients.outcomes import FailureKind, Outcome, RefusedCause
from mesh.clients.placement import Course, Demand, Grant
from mesh.clients.usage import Usage
from mesh.errors import DeadlineExceeded, Overloaded, ShoalError, Unavailable

if TYPE_CHECKING:
    from shoal.scheduler.v1 import scheduler_pb2_grpc

# After the answer: seconds that telling the scheduler may take.
CLOSE_S = 1.0
# An adoption is answered at once; a replica that is not so quick is not well.
ADOPT_S = 5.0
# An answer that broke in the middle, with no scheduler there: seconds beyond `no_scheduler_s` for one to be restarted.
RESTART_S = 5.0

log = logging.getLogger("shoal.lease")


@dataclass(frozen=True, slots=True)
class LeaseLimits:
    """Seconds: `queue_s` for one wait in the queue, `no_scheduler_s` for a first scheduler; `deadline` is loop time.

    Once let in, a request waits for a lost scheduler as long as for a place; only a broken answer gives up sooner.
    """

    queue_s: float
    no_scheduler_s: float
    deadline: float


class Replicas(Protocol):
    """What a lease asks of mesh.clients.scheduler.Schedulers."""

    async def changed(self) -> None: ...

    def owner(self, model: str, pool: str = "", *, shun: frozenset[str] = frozenset()) -> str | None: ...

    def stub(self, address: str) -> "scheduler_pb2_grpc.SchedulerServiceAsyncStub | None": ...

    def spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]: ...


class Lease:
    """`open`, then after each grant at most one of `refused`, `failed`, `parked`; always `close`."""

    def __init__(
        self, replicas: Replicas, demand: Demand, limits: LeaseLimits, metadata: tuple[tuple[str, str], ...] = ()
    ) -> None:
        self._replicas = replicas
        self._course = Course(demand)
        self._limits = limits
        self._metadata = metadata
        self._loop = asyncio.get_running_loop()
        self._id = demand.meta.request_id
        self._dialogue: Dialogue | None = None
        self._at = ""
        self._broken = False  # tokens came, and then their worker failed
        self._running: Grant | None = None
        self._adopting: asyncio.Task[None] | None = None
        self._scope: asyncio.Timeout | None = None
        self._cut: ShoalError | None = None

    @property
    def queued_s(self) -> float:
        """Seconds spent waiting for grants so far."""
        return self._course.queued_s

    def pin(self, model_digest: bytes, precision: str) -> None:
        """From now on only workers of these weights and numerics will do."""
        self._course.demand = replace(self._course.demand, model_digest=model_digest, precision=precision)

    def cut(self, error: ShoalError) -> None:
        """End a wait for a grant from outside: it raises `error`, the first one if told twice."""
        self._cut = self._cut or error
        if self._scope is not None and not self._scope.expired():
            self._scope.reschedule(self._loop.time())

    async def open(self) -> Grant:
        """Queue the request and wait for its place.

        Raises Overloaded (queue full, or the wait was too long), Unavailable (no scheduler or worker), InvalidRequest
        (fits no worker), DeadlineExceeded.
        """
        return await self._next(None)

    async def refused(self, cause: RefusedCause, retry_after_s: float | None) -> Grant:
        """The granted worker said no; wait for another place. Raises as `open`."""
        grant = self._ended()
        if cause is RefusedCause.MISMATCH:
            self._course.avoid.append(grant.worker_id)
        return await self._next(placement.refused(grant, cause, retry_after_s))

    async def failed(self, kind: FailureKind, reason: str, emitted_tokens: int) -> Grant:
        """The granted worker broke after `emitted_tokens` in all; wait for another place. Raises as `open`."""
        grant = self._ended()
        self._course.emitted_tokens = emitted_tokens
        self._course.avoid.append(grant.worker_id)
        self._broken = emitted_tokens > 0
        return await self._next(placement.failed(grant, kind, reason, emitted_tokens))

    async def parked(self, emitted_tokens: int, more_block_keys: bytes = b"") -> Grant:
        """The worker gave the request up in good order; wait for another place. Raises as `open`."""
        self._course.emitted_tokens = emitted_tokens
        return await self._next(placement.parked(self._ended(), emitted_tokens, more_block_keys))

    async def close(self, outcome: Outcome, usage: Usage) -> None:
        """Tell the scheduler how it ended, if there is one to tell, and give the lease back."""
        self._running = None
        await self._stop_adopting()
        if self._dialogue is None:
            return
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._dialogue.finish(self._course.finished(outcome, usage))
        except TimeoutError:
            log.debug("lease %s: scheduler %s did not hear of its end", self._id, self._at)
        finally:
            self._dialogue.cancel()

    def _ended(self) -> Grant:
        """The grant whose attempt is over."""
        if self._running is None:
            raise RuntimeError("no attempt runs under this lease")
        return self._running

    async def _next(self, event: placement.LeaseEvent | None) -> Grant:
        """Send `event` (None = Open) and wait for its Grant, through any number of schedulers."""
        self._running = None
        await self._stop_adopting()
        if self._cut is not None:
            raise self._cut
        began = self._loop.time()
        try:
            async with asyncio.timeout_at(min(began + self._limits.queue_s, self._limits.deadline)) as self._scope:
                grant = await self._persist(event, began)
        except TimeoutError:
            raise self._out_of_time() from None
        finally:
            self._scope = None
            self._course.queued_s += self._loop.time() - began
        self._course.attempt = grant.attempt
        self._broken = False
        self._running = grant
        if self._dialogue is not None and self._dialogue.over:  # it ended between its grant and here
            self._on_end(self._dialogue)
        return grant

    def _out_of_time(self) -> ShoalError:
        if self._cut is not None:
            return self._cut
        if self._loop.time() >= self._limits.deadline:
            return DeadlineExceeded("the request's time was over before a worker had room")
        return Overloaded(f"no worker had room within {self._limits.queue_s:g} s", retry_after_s=5)

    async def _persist(self, event: placement.LeaseEvent | None, began: float) -> Grant:
        backoff = Backoff()
        shun: set[str] = set()
        while True:
            try:
                dialogue = self._dialogue
                if event is None or dialogue is None or dialogue.over:
                    dialogue = await self._dial(frozenset(shun))
                    event = self._course.open(self._loop.time() - began)
                return await dialogue.ask(event)
            except Lost as lost:
                log.info("lease %s: scheduler %s is lost (%s)", self._id, self._at, lost)
                shun.add(self._at)
                event = None
            await asyncio.sleep(backoff.next_s())

    async def _dial(self, shun: frozenset[str]) -> Dialogue:
        """Start an Acquire at the owner, waiting for a replica to live if none does."""
        demand = self._course.demand
        try:
            async with asyncio.timeout(self._patience_s()):
                while (address := self._replicas.owner(demand.meta.model, demand.pool, shun=shun)) is None:
                    await self._replicas.changed()
        except TimeoutError:
            raise Unavailable("no scheduler answers now", code="no_scheduler", retry_after_s=2) from None
        stub = self._replicas.stub(address)
        if stub is None:
            raise Lost("it left the targets")
        self._at = address
        timeout_s = max(0.0, self._limits.deadline - self._loop.time()) + CLOSE_S
        self._dialogue = Dialogue(stub, self._on_end, timeout_s, self._metadata)
        return self._dialogue

    def _patience_s(self) -> float | None:
        """Seconds to look for a scheduler that lives; None = as long as the wait itself may last."""
        if not self._at:
            return self._limits.no_scheduler_s
        return self._limits.no_scheduler_s + RESTART_S if self._broken else None

    def _on_end(self, dialogue: Dialogue) -> None:
        """The RPC ended. Under a running attempt that means: find another scheduler, in the background."""
        if self._running is not None and dialogue is self._dialogue and self._adopting is None:
            self._adopting = self._replicas.spawn(self._adopt(self._running))

    async def _adopt(self, grant: Grant) -> None:
        backoff = Backoff()
        log.info("lease %s: scheduler %s is lost while it runs", self._id, self._at)
        event = self._course.adopt(grant)
        while True:
            await asyncio.sleep(backoff.next_s())
            try:
                dialogue = await self._dial(frozenset())
                async with asyncio.timeout(ADOPT_S):
                    await dialogue.ask(event)
            except (Lost, TimeoutError) as lost:
                log.debug("adoption failed: %r", lost)
            except ShoalError as error:
                log.warning("lease %s: %s will not adopt it: %s", self._id, self._at, error)
                return
            else:
                if not dialogue.over:
                    break
        self._adopting = None

    async def _stop_adopting(self) -> None:
        """An adoption under way is given up, and with it the half-made call."""
        adopting, self._adopting = self._adopting, None
        if adopting is None:
            return
        adopting.cancel()
        if self._dialogue is not None:
            self._dialogue.cancel()
            self._dialogue = None
        # Not `await adopting`: its cancellation and ours would look the same.
        await asyncio.wait([adopting])
