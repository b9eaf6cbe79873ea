"""The worker's side of Attach: dials every scheduler replica and stays attached, so that a request can be placed here.

Each address has a task, a journal and sequence numbers of its own. Losing one, or all, touches nothing that runs:
tokens do not pass through schedulers. Two addresses may be one scheduler (a host with two IPs): it keeps the newest
attachment and supersedes the other, which then rests as long as the newest lasts.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass

import grpc

from mesh.client import Backoff, connect
from mesh.clients.board import Board, Journal
from mesh.clients.claims import Claims
from mesh.clients.reports import LoadState, WorkerFacts, hello_of, load_of
from mesh.discovery import at_each
from mesh.errors import DeadlineExceeded, ShoalError, Superseded, Unavailable, status_as_errors
from mesh.tls import SCHEDULER, Tls
from shoal.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc

# Of scheduler.proto: a Load on change, at most every MIN_GAP_S, at least every MAX_GAP_S.
MIN_GAP_S = 0.05
MAX_GAP_S = 1.0
WELCOME_S = 5.0
# An address whose scheduler is attached through another one is tried again after so long: it may have become another's.
REST_S = 30.0
# Seconds within which the attachment that superseded ours has its Welcome, too.
SETTLE_S = 0.5

log = logging.getLogger("shoal.attach")


@dataclass(frozen=True, slots=True)
class Attached:
    """The worker behind the reports. `park` takes request_id, attempt, reason and ignores what does not run."""

    facts: WorkerFacts
    board: Board
    load: Callable[[], LoadState]
    park: Callable[[str, int, str], None]


class Attacher:
    """Keeps `worker` attached to every address behind `targets` (host:port, comma-separated)."""

    def __init__(self, worker: Attached, targets: str, tls: Tls | None = None) -> None:
        self._worker = worker
        self._targets = targets
        self._tls = tls
        self._claims = Claims()
        self._ids: dict[str, str] = {}  # address -> id of the scheduler that last said Welcome there
        self._detached = asyncio.Event()
        self._missed: set[str] = set()  # addresses whose absence has been told since they were last attached

    @property
    def replicas(self) -> frozenset[str]:
        """Addresses of the schedulers attached to now."""
        return self._claims.attached

    async def run(self) -> None:
        """Until cancelled: one task for each address there is."""
        await at_each(self._targets, self._stay, "attach")

    async def _stay(self, address: str) -> None:
        """Attach again and again. Each try has a fresh channel, so the transport's own back-off never adds to ours."""
        backoff = Backoff()
        while True:
            try:
                async with connect(address, self._tls, SCHEDULER) as channel, status_as_errors():
                    await self._attach(channel, address, backoff)
            except Superseded:
                await self._rest(address)
            except ShoalError as error:
                if address not in self._missed:
                    log.warning("not attached to scheduler %s: %s", address, error.message)
                self._missed.add(address)
            await asyncio.sleep(backoff.next_s())

    async def _rest(self, address: str) -> None:
        """After it was superseded: wait while its scheduler is attached through another address, at most REST_S."""
        await asyncio.sleep(SETTLE_S)
        with suppress(TimeoutError):
            async with asyncio.timeout(REST_S):
                while other := self._twin(address):
                    log.debug("scheduler %s is attached as %s", address, other)
                    await self._detached.wait()

    def _twin(self, address: str) -> str | None:
        """An address through which the scheduler of `address` is attached now."""
        others = self._claims.attached - {address}
        return next((other for other in others if self._ids[other] == self._ids.get(address)), None)

    async def _attach(self, channel: grpc.aio.Channel, address: str, backoff: Backoff) -> None:
        """One Attach from Hello to its end, which always raises."""
        with self._worker.board.journal() as journal:
            call = scheduler_pb2_grpc.SchedulerServiceStub(channel).Attach(self._reports(journal))
            try:
                replica = self._ids[address] = await _welcome(call)
                backoff.reset()
                self._missed.discard(address)
                log.info("attached to scheduler %s at %s", replica, address)
                await self._obey(call, address, journal)
            finally:
                call.cancel()

    async def _reports(self, journal: Journal) -> AsyncIterator[scheduler_pb2.WorkerReport]:
        yield hello_of(self._worker.facts)
        seq = 0
        while True:
            seq += 1
            yield load_of(self._worker.load(), seq, self._claims.epoch, journal.take())
            await asyncio.sleep(MIN_GAP_S)
            await journal.news(MAX_GAP_S - MIN_GAP_S)

    async def _obey(self, call: "_Call", address: str, journal: Journal) -> None:
        self._claims.attach(address)
        self._worker.board.touch()
        try:
            while isinstance(order := await call.read(), scheduler_pb2.WorkerOrder):
                self._follow(order, address, journal)
        finally:
            self._claims.detach(address)
            self._detached.set()  # wakes who waits now
            self._detached.clear()
            self._worker.board.touch()
        raise Unavailable("it ended the attachment")

    def _follow(self, order: scheduler_pb2.WorkerOrder, address: str, journal: Journal) -> None:
        """An order of a newer neighbour that we do not know is passed over."""
        match order.WhichOneof("order"):
            case "stop":
                self._worker.park(order.stop.request_id, order.stop.attempt, order.stop.reason)
            case "unclaimed":
                told = ((running.request_id, running.attempt) for running in order.unclaimed.attempts)
                for request_id, attempt in self._claims.hear(address, order.unclaimed.attach_epoch, told):
                    self._worker.park(request_id, attempt, "no scheduler holds a lease")
            case "send_snapshot":
                journal.tell_everything()


_Call = grpc.aio.StreamStreamCall[scheduler_pb2.WorkerReport, scheduler_pb2.WorkerOrder]


async def _welcome(call: _Call) -> str:
    """The replica's id out of its answer to Hello. Raises DeadlineExceeded or Unavailable without one."""
    try:
        async with asyncio.timeout(WELCOME_S):
            order = await call.read()
    except TimeoutError:
        raise DeadlineExceeded(f"no answer to Hello within {WELCOME_S:g} s") from None
    if not isinstance(order, scheduler_pb2.WorkerOrder) or not order.HasField("welcome"):
        raise Unavailable("it did not answer Hello with Welcome")
    return order.welcome.scheduler_id
