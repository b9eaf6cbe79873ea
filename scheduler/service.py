"""SchedulerService: turns messages into the dispatcher's events and its effects into messages; decides nothing."""

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry import trace

from mesh.errors import ShoalError
from mesh.server import InFlight
from scheduler.bounds import uint32
from scheduler.dispatcher import Dispatcher
from scheduler.effects import Disconnected, Effect, Ended, Granted, SnapshotOrdered, Voted
from scheduler.leases import Failed, Finished
from scheduler.mailbox import Mailbox, beside
from scheduler.metrics import Metrics
from scheduler.translate import event_of, grant_of, hello_of, load_of, queue_state_of, unclaimed_of, without_lists
from shoal.scheduler.v1 import scheduler_pb2 as pb
from shoal.scheduler.v1 import scheduler_pb2_grpc as rpc

# Messages that a peer may leave unread.
LEASE_MAIL, ORDER_MAIL = 8, 64
# WatchLoad: at most this often, and at least this often.
WATCH_LEAST_S, WATCH_MOST_S = 0.1, 1.0
OBSERVE_S = 1.0

Context = grpc.aio.ServicerContext[Any, Any]
log = logging.getLogger("shoal.scheduler")


@dataclass(slots=True)
class _Attached:
    """What a worker said last, for WatchLoad to pass on unread."""

    hello: pb.Hello
    load: pb.Load | None = None
    reported_s: float = 0.0


@dataclass(slots=True)
class _Streams:
    """Open RPCs: what each has to send, and whom a change of the mesh wakes."""

    leases: dict[int, Mailbox[Granted]] = field(default_factory=dict)
    orders: dict[int, Mailbox[pb.WorkerOrder]] = field(default_factory=dict)
    attached: dict[int, _Attached] = field(default_factory=dict)
    watchers: set[asyncio.Event] = field(default_factory=set)


class SchedulerService(rpc.SchedulerServiceServicer):
    """One replica. `run` beside the server gives it its sense of time."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        metrics: Metrics,
        scheduler_id: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._id = scheduler_id
        self._clock = clock
        self._numbers = itertools.count(1)
        self._streams = _Streams()
        self._in_flight = InFlight()

    async def run(self, tick_s: float) -> None:
        """Let time pass until cancelled."""
        observed_s = -OBSERVE_S
        while True:
            now = self._clock()
            self._carry_out(self._dispatcher.tick(now))
            if now - observed_s >= OBSERVE_S:
                self._metrics.observe(self._dispatcher, now)
                observed_s = now
            await asyncio.sleep(tick_s)

    async def drain(self, timeout_s: float) -> bool:
        """Send every lease and worker elsewhere, tell the watchers, and wait until all streams have ended."""
        self._carry_out(self._dispatcher.drain())
        self._wake_watchers()
        return await self._in_flight.drain(timeout_s)

    def _carry_out(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            self._metrics.count(effect)
            if isinstance(effect, Granted) and effect.lease_id in self._streams.leases:
                self._streams.leases[effect.lease_id].put(effect)
            elif isinstance(effect, Ended) and effect.lease_id in self._streams.leases:
                self._streams.leases[effect.lease_id].end(effect.error)
            elif isinstance(effect, SnapshotOrdered | Voted | Disconnected):
                self._order(effect)
        if effects:
            self._wake_watchers()

    def _order(self, effect: SnapshotOrdered | Voted | Disconnected) -> None:
        mailbox = self._streams.orders.get(effect.connection)
        if mailbox is None:
            return
        if isinstance(effect, Disconnected):
            self._streams.attached.pop(effect.connection, None)
            mailbox.end(effect.error)
        elif isinstance(effect, Voted):
            log.warning("unclaimed attempts", extra={"fields": {"attempts": sorted(effect.attempts)}})
            mailbox.put(unclaimed_of(effect))
        else:
            mailbox.put(pb.WorkerOrder(send_snapshot=pb.SendSnapshot()))

    # ---- Acquire --------------------------------------------------------------------

    async def Acquire(
        self, request_iterator: AsyncIterator[pb.LeaseEvent], context: Context
    ) -> AsyncIterator[pb.Grant]:
        """One lease. However this generator is left, the queue place or the charge is given back."""
        span = trace.get_current_span()
        lease_id, mailbox = next(self._numbers), Mailbox[Granted](LEASE_MAIL)
        async with self._in_flight.rpc(context):
            self._streams.leases[lease_id] = mailbox
            try:
                async with beside(self._read_lease(lease_id, request_iterator, mailbox)):
                    async for granted in mailbox:
                        annotate(span, granted)
                        yield grant_of(granted, self._id)
            finally:
                del self._streams.leases[lease_id]
                self._carry_out(self._dispatcher.close(lease_id, self._clock()))
                self._wake_watchers()

    async def _read_lease(self, lease_id: int, events: AsyncIterator[pb.LeaseEvent], mailbox: Mailbox[Granted]) -> None:
        try:
            async for message in events:
                event = event_of(message)
                if isinstance(event, Failed):
                    fields = {"worker": event.worker_id, "kind": event.kind.name, "reason": event.reason}
                    log.warning("an attempt failed", extra={"fields": fields})
                if event is not None:
                    self._carry_out(self._dispatcher.handle(lease_id, event, self._clock()))
                    self._wake_watchers()
                if isinstance(event, Finished):
                    break  # the last word: a look for another one would only be cancelled
        except ShoalError as error:
            mailbox.end(error)
        finally:
            mailbox.end()

    # ---- Attach ---------------------------------------------------------------------

    async def Attach(
        self, request_iterator: AsyncIterator[pb.WorkerReport], context: Context
    ) -> AsyncIterator[pb.WorkerOrder]:
        """One worker. When its stream ends it is gone at once."""
        connection, mailbox = next(self._numbers), Mailbox[pb.WorkerOrder](ORDER_MAIL)
        async with self._in_flight.rpc(context):
            self._streams.orders[connection] = mailbox
            try:
                async with beside(self._read_worker(connection, request_iterator, mailbox)):
                    async for order in mailbox:
                        yield order
            finally:
                del self._streams.orders[connection]
                attached = self._streams.attached.pop(connection, None)
                self._dispatcher.detach(connection)
                self._wake_watchers()
                if attached is not None:
                    log.info("worker gone", extra={"fields": {"worker": attached.hello.worker_id}})

    async def _read_worker(
        self, connection: int, reports: AsyncIterator[pb.WorkerReport], mailbox: Mailbox[pb.WorkerOrder]
    ) -> None:
        try:
            async for message in reports:
                self._take_report(connection, message, mailbox)
                self._wake_watchers()
        except ShoalError as error:
            mailbox.end(error)
        finally:
            mailbox.end()

    def _take_report(self, connection: int, message: pb.WorkerReport, mailbox: Mailbox[pb.WorkerOrder]) -> None:
        now = self._clock()
        kind = message.WhichOneof("report")
        if kind == "hello":
            effects = self._dispatcher.attach(connection, hello_of(message.hello), now)
            self._streams.attached[connection] = _Attached(message.hello)
            mailbox.put(pb.WorkerOrder(welcome=pb.Welcome(scheduler_id=self._id)))
            self._carry_out(effects)
            fields = {"worker": message.hello.worker_id, "address": message.hello.address, "model": message.hello.model}
            log.info("worker attached", extra={"fields": fields})
        elif kind == "load":
            effects = self._dispatcher.load(connection, load_of(message.load), now)
            attached = self._streams.attached[connection]
            attached.load, attached.reported_s = without_lists(message.load), now
            self._carry_out(effects)

    # ---- WatchLoad ------------------------------------------------------------------

    async def WatchLoad(self, request: pb.WatchLoadRequest, context: Context) -> AsyncIterator[pb.MeshLoad]:
        """The mesh: at once, then on change, at most ten times a second and at least each second. Ends on shutdown."""
        changed = asyncio.Event()
        async with self._in_flight.rpc(context):
            self._streams.watchers.add(changed)
            try:
                while True:
                    changed.clear()
                    mesh = self._mesh_load()
                    yield mesh
                    if mesh.draining:
                        return
                    await asyncio.sleep(WATCH_LEAST_S)
                    await _wait(changed, WATCH_MOST_S - WATCH_LEAST_S)
            finally:
                self._streams.watchers.discard(changed)

    def _wake_watchers(self) -> None:
        for changed in self._streams.watchers:
            changed.set()

    def _mesh_load(self) -> pb.MeshLoad:
        now = self._clock()
        workers = [
            pb.WorkerState(
                hello=attached.hello,
                load=attached.load,
                age_ms=uint32((now - attached.reported_s) * 1_000) if attached.load is not None else 0,
                charged_tokens=self._dispatcher.fleet.ledger.cost_of(attached.hello.worker_id),
            )
            for attached in self._streams.attached.values()
        ]
        return pb.MeshLoad(
            scheduler_id=self._id,
            workers=workers,
            queues=[queue_state_of(stat) for stat in self._dispatcher.queues(now)],
            draining=self._dispatcher.draining,
            settled=self._dispatcher.settled(now),
        )


async def _wait(event: asyncio.Event, most_s: float) -> None:
    """Until the event is set, at most `most_s`."""
    try:
        async with asyncio.timeout(most_s):
            await event.wait()
    except TimeoutError:
        return


def annotate(span: trace.Span, granted: Granted) -> None:
    """Explain the wait and the choice on the RPC's own span."""
    if not span.is_recording():
        return
    span.set_attributes(
        {
            "shoal.queue_class": granted.queue_class,
            "shoal.queue_wait_ms": round(granted.waited_s * 1_000, 3),
            "shoal.worker": granted.worker_id,
            "shoal.placement.reason": granted.reason,
            "shoal.candidates": [
                f"{c.worker_id} {c.expected_ms:.1f} ms, cached {sum(c.cached_tokens)}" for c in granted.candidates
            ],
            "shoal.ahead": granted.ahead,
            "shoal.attempt": granted.attempt,
        }
    )
    span.add_event("granted", {"shoal.worker": granted.worker_id, "shoal.attempt": granted.attempt})
