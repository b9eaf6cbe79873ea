"""The one place where leases, queues and workers meet: an event goes in, effects come out.

Synchronous, without a clock or I/O of its own: the service, the simulator and the tests run this very code. It owns all
state of a scheduler replica. An event that its sender got wrong raises a ShoalError and changes nothing.
"""

from dataclasses import dataclass, field

from mesh.errors import Internal, InvalidRequest, Overloaded, ShoalError, Superseded, Unavailable
from scheduler.absence import Absence, AbsencePolicy
from scheduler.breaker import BreakerPolicy
from scheduler.demand import class_name, size_of
from scheduler.effects import Disconnected, Effect, Ended, Granted, Requeued
from scheduler.fairness import Shape, Waiting
from scheduler.fleet import Fleet
from scheduler.leases import Adopt, Event, Failed, FailureKind, Finished, Lease, Open, Parked, Refused, State
from scheduler.lines import Lines, QueueStat
from scheduler.placement import Ask, Placement, PlacementPolicy, limits_of, never_fits, serving
from scheduler.queue import QueuePolicy
from scheduler.reports import Hello, Load

# Bounds of the wait that a full queue tells its callers.
LEAST_RETRY_S, MOST_RETRY_S = 1.0, 60.0


@dataclass(frozen=True, slots=True)
class Policies:
    """Everything that can be tuned. After `most_failures` workers failed under a request, the request is to blame."""

    queue: QueuePolicy = field(default_factory=QueuePolicy)
    placement: PlacementPolicy = field(default_factory=PlacementPolicy)
    breaker: BreakerPolicy = field(default_factory=BreakerPolicy)
    absence: AbsencePolicy = field(default_factory=AbsencePolicy)
    unclaimed_after_s: float = 10.0
    most_failures: int = 4
    sessions: int = 10_000


class Dispatcher:
    """One replica's state. `now` is seconds of any clock that does not go back."""

    def __init__(self, policies: Policies, now: float) -> None:
        self.fleet = Fleet(policies.breaker, policies.unclaimed_after_s, policies.sessions)
        self.draining = False
        self._policies = policies
        self._lines = Lines(policies.queue, policies.placement)
        self._absence = Absence(policies.absence, now)
        self._leases: dict[int, Lease] = {}
        self._by_request: dict[str, Lease] = {}

    # ---- what can be seen ---------------------------------------------------------

    def settled(self, now: float) -> bool:
        """Up long enough that an absent model is absent."""
        return self._absence.settled(now)

    def queues(self, now: float) -> list[QueueStat]:
        """What waits, by class."""
        return self._lines.stats(now)

    def lease_count(self, state: State) -> int:
        """Leases that stand there now."""
        return sum(lease.state is state for lease in self._leases.values())

    # ---- workers ------------------------------------------------------------------

    def attach(self, connection: int, hello: Hello, now: float) -> list[Effect]:
        """A worker's Hello on a stream that the caller numbered."""
        self._refuse_while_draining()
        return self.fleet.attach(connection, hello, now)

    def load(self, connection: int, load: Load, now: float) -> list[Effect]:
        """A worker's report; what waits for such a worker may go now."""
        line = self.fleet.worker_of(connection).hello.pins.line
        return self.fleet.load(connection, load, now) + self._dispatch(line, now)

    def detach(self, connection: int) -> None:
        """A worker's stream ended, however. Its leases' gateways see their own streams break."""
        self.fleet.detach(connection)

    # ---- leases -------------------------------------------------------------------

    def handle(self, lease_id: int, event: Event, now: float) -> list[Effect]:
        """An event of a lease that the caller numbered. Raises what its RPC must end with."""
        if isinstance(event, Open):
            return self._open(lease_id, event, now)
        if isinstance(event, Adopt):
            return self._adopt(lease_id, event, now)
        lease = self._leases.get(lease_id)
        if lease is None:
            raise InvalidRequest("a lease's first event must be open or adopt", field=type(event).__name__.lower())
        if isinstance(event, Finished):
            return self._finished(lease, event, now)
        lease.check(event)
        if isinstance(event, Refused):
            self.fleet.refused(lease, event)
            return self._requeue(lease, f"refused_{event.cause.name.lower()}", now)
        if isinstance(event, Failed):
            return self._failed(lease, event, now)
        return self._parked(lease, event, now)

    def close(self, lease_id: int, now: float) -> list[Effect]:
        """The lease's RPC ended, however. Closing one that is over is harmless."""
        lease = self._leases.get(lease_id)
        if lease is None:
            return []
        self._forget(lease)
        return self._dispatch(lease.demand.pins.line, now)

    def _open(self, lease_id: int, event: Open, now: float) -> list[Effect]:
        demand = event.demand
        self._check_new(lease_id)
        limits = limits_of(demand.pins, demand.choices, self.fleet.workers) if self.settled(now) else None
        unfit = never_fits(demand, limits)
        if unfit is not None:
            raise unfit
        line = self._lines.line(demand.pins.line)
        # One that waited or ran elsewhere has been let in already.
        if not (event.waited_s or event.last_attempt) and line.full_for(demand.tenant, demand.priority):
            wait_s = min(max(line.turnover_s(), LEAST_RETRY_S), MOST_RETRY_S)
            raise Overloaded("the queue is full", code="queue_full", retry_after_s=wait_s)
        effects, floor = self._supersede(demand.request_id)
        lease = Lease(
            id=lease_id,
            demand=demand,
            arrived_s=now - event.waited_s,
            waited_s=event.waited_s,
            emitted_tokens=event.emitted_tokens,
            attempt_floor=max(event.last_attempt, floor),
            shun=event.avoid,
            adrift_s=now - event.waited_s if event.emitted_tokens else None,
        )
        self._remember(lease)
        self._enqueue(lease, now)
        return effects + self._dispatch(demand.pins.line, now)

    def _adopt(self, lease_id: int, event: Adopt, now: float) -> list[Effect]:
        self._check_new(lease_id)
        effects, floor = self._supersede(event.demand.request_id)
        lease = Lease(
            id=lease_id,
            demand=event.demand,
            arrived_s=now - event.waited_s,
            waited_s=event.waited_s,
            emitted_tokens=event.emitted_tokens,
            attempt=event.attempt,
            attempt_floor=floor,
            shun=event.avoid,
            state=State.GRANTED,
            worker_id=event.worker_id,
        )
        self._remember(lease)
        self.fleet.adopt(lease)
        granted = Granted(
            lease_id,
            event.worker_id,
            event.address,
            event.attempt,
            reason="adopted",
            queue_class=self._class_of(lease),
            waited_s=event.waited_s,
            adopted=True,
        )
        return [*effects, granted]

    def _check_new(self, lease_id: int) -> None:
        self._refuse_while_draining()
        if lease_id in self._leases:
            raise InvalidRequest("a lease is opened or adopted once, by its first event", field="open")

    def _refuse_while_draining(self) -> None:
        if self.draining:
            raise draining_error()

    def _supersede(self, request_id: str) -> tuple[list[Effect], int]:
        """A second lease of a request ends the first; returns the highest attempt that one knew of."""
        former = self._by_request.get(request_id)
        if former is None:
            return [], 0
        effect = self._end(former, Superseded(f"a newer lease of request {request_id} took over"))
        return [effect], max(former.attempt, former.attempt_floor)

    def _failed(self, lease: Lease, event: Failed, now: float) -> list[Effect]:
        self.fleet.failed(lease, event, now)
        lease.failed(event, now)
        alone = event.kind is FailureKind.STEP_ERROR and not serving(lease.ask(), self.fleet.workers).any()
        if alone or lease.step_errors > 1 or lease.failures >= self._policies.most_failures:
            error = Internal(f"the request failed on {lease.failures} worker(s)", code="step_error")
            return [self._end(lease, error), *self._dispatch(lease.demand.pins.line, now)]
        return self._requeue(lease, f"failed_{event.kind.name.lower()}", now)

    def _parked(self, lease: Lease, event: Parked, now: float) -> list[Effect]:
        self.fleet.release(lease)
        lease.emitted(event.emitted_tokens)
        lease.adrift_s = now
        lease.more_keys = event.more_block_keys
        return self._requeue(lease, "parked", now)

    def _finished(self, lease: Lease, event: Finished, now: float) -> list[Effect]:
        if lease.state is State.GRANTED:
            if event.attempt != lease.attempt:
                raise InvalidRequest(f"finished: granted was attempt {lease.attempt}", field="finished.attempt")
            self.fleet.release(lease, event.completed)
        return [self._end(lease, None), *self._dispatch(lease.demand.pins.line, now)]

    # ---- the queue ----------------------------------------------------------------

    def _enqueue(self, lease: Lease, now: float) -> None:
        lease.state, lease.queued_s = State.QUEUED, now
        lease.waiting = self._policies.queue.waiting(
            lease.id,
            lease.demand,
            lease.arrived_s,
            lease.emitted_tokens,
            Shape(lease.demand.pins, lease.avoid, lease.shun),
            adrift=lease.adrift_s is not None,
        )
        lease.ahead = self._lines.line(lease.demand.pins.line).add(lease.waiting)

    def _requeue(self, lease: Lease, cause: str, now: float) -> list[Effect]:
        """Back into the queue with its age."""
        self._enqueue(lease, now)
        return [Requeued(lease.id, cause), *self._dispatch(lease.demand.pins.line, now)]

    def _dispatch(self, line: tuple[str, str], now: float) -> list[Effect]:
        """Grant whatever has room now."""
        if self.draining:
            return []
        grants = self._lines.round(line, self.fleet.workers, self._ask_of, now)
        return [self._grant(waiting, placement, now) for waiting, placement in grants]

    def _ask_of(self, waiting: Waiting) -> Ask:
        lease = self._leases[waiting.lease_id]
        return lease.ask(self.fleet.home_of(lease))

    def _grant(self, waiting: Waiting, placement: Placement, now: float) -> Granted:
        lease = self._leases[waiting.lease_id]
        worker = self.fleet.book(lease, placement, now)
        return Granted(
            lease.id,
            worker.hello.worker_id,
            worker.hello.address,
            lease.attempt,
            reason=placement.reason,
            queue_class=class_name(waiting.priority, waiting.size),
            waited_s=lease.waited_s,
            ahead=lease.ahead,
            candidates=placement.candidates,
        )

    def _class_of(self, lease: Lease) -> str:
        size = size_of(lease.demand.cost(lease.emitted_tokens), self._policies.queue.size_bounds)
        return class_name(lease.demand.priority, size)

    # ---- time and the end -----------------------------------------------------------

    def tick(self, now: float) -> list[Effect]:
        """What time alone changes; call it every hundred milliseconds or so."""
        self.fleet.workers.refresh_breakers(now)
        self._lines.sweep()
        effects: list[Effect] = []
        for lease, error in self._lost_causes(now):
            effects.append(self._end(lease, error))
        for line in self._lines.active():
            effects += self._dispatch(line, now)
        return effects

    def _lost_causes(self, now: float) -> list[tuple[Lease, ShoalError]]:
        """Waiting requests that no worker will ever take, or none that is there."""
        if not self.settled(now):
            return []
        workers = self.fleet.workers
        shapes = {waiting.shape for waiting in self._lines}
        hopeless = self._absence.hopeless(shapes, workers, self._policies.placement, now)
        kinds = {(waiting.shape.pins, waiting.choices) for waiting in self._lines}
        limits = {kind: limits_of(*kind, workers) for kind in kinds}
        causes: list[tuple[Lease, ShoalError]] = []
        for waiting in self._lines:
            lease = self._leases[waiting.lease_id]
            kind = waiting.shape.pins, waiting.choices
            if lease.adrift_s is None:
                vain = hopeless.get(waiting.shape)
            else:
                vain = self._absence.gone_for_good(waiting.shape, lease.adrift_s, now)
            error = vain or never_fits(lease.demand, limits[kind])
            if error is not None:
                causes.append((lease, error))
        return causes

    def drain(self) -> list[Effect]:
        """Shut down: every lease and every worker is sent elsewhere. What runs is not touched by that."""
        self.draining = True
        effects: list[Effect] = [self._end(lease, draining_error()) for lease in list(self._leases.values())]
        effects += [Disconnected(connection, draining_error()) for connection in self.fleet.connections()]
        return effects

    # ---- the books ------------------------------------------------------------------

    def _remember(self, lease: Lease) -> None:
        self._leases[lease.id] = self._by_request[lease.demand.request_id] = lease

    def _forget(self, lease: Lease) -> None:
        """The lease is over: its queue place or its charge is given back."""
        if lease.waiting is not None:
            self._lines.line(lease.demand.pins.line).remove(lease.waiting)
        else:
            self.fleet.release(lease)
        del self._leases[lease.id]
        del self._by_request[lease.demand.request_id]

    def _end(self, lease: Lease, error: ShoalError | None) -> Ended:
        self._forget(lease)
        return Ended(lease.id, error)


def draining_error() -> Unavailable:
    """What ends an RPC of a replica that shuts down."""
    return Unavailable("this scheduler is shutting down; ask another replica", code="draining", retry_after_s=1)
