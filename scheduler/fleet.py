"""The workers together with what was promised on them: attach and report on one side, book and release on the other."""

from collections import OrderedDict

from mesh.cost import cost, prices_of
from mesh.errors import InvalidRequest, Superseded
from scheduler.breaker import BreakerPolicy, State
from scheduler.charges import Charge, Ledger
from scheduler.effects import Disconnected, Effect, SnapshotOrdered, Voted
from scheduler.leases import Failed, Lease, Refused, RefusedCause
from scheduler.placement import Placement
from scheduler.registry import Registry, Worker
from scheduler.reports import Hello, Load


class Fleet:
    """Keeps registry and ledger in step. `sessions` = how many sessions' last workers are remembered."""

    def __init__(self, breaker: BreakerPolicy, unclaimed_after_s: float, sessions: int) -> None:
        self.workers = Registry(breaker, unclaimed_after_s)
        self.ledger = Ledger()
        self._connections: dict[int, Worker] = {}
        self._most_sessions = sessions
        self._homes: OrderedDict[tuple[str, str], str] = OrderedDict()

    # ---- workers ----------------------------------------------------------------

    def attach(self, connection: int, hello: Hello, now: float) -> list[Effect]:
        """A worker dialled in. A second stream of a worker replaces the first."""
        if connection in self._connections:
            raise InvalidRequest("hello is sent once, as a stream's first report", field="hello")
        effects: list[Effect] = []
        former = self.workers.get(hello.worker_id)
        if former is not None:
            self.detach(former.connection)
            error = Superseded(f"worker {hello.worker_id} has attached again")
            effects.append(Disconnected(former.connection, error))
        worker = self.workers.attach(hello, connection, now)
        self._connections[connection] = worker
        self._refresh(worker)
        return effects

    def detach(self, connection: int) -> None:
        """The worker's stream ended: nothing is placed there from now on. Unknown streams are ignored."""
        worker = self._connections.pop(connection, None)
        if worker is not None:
            self.workers.detach(worker)
            self.ledger.worker_left(worker.hello.worker_id)

    def load(self, connection: int, load: Load, now: float) -> list[Effect]:
        """A worker's report: its load, the ends of charges, and attempts that nobody here claims."""
        worker = self.worker_of(connection)
        if load.seq <= worker.seq:
            return []
        effects: list[Effect] = []
        if self.workers.report(worker, load, now):
            effects.append(SnapshotOrdered(connection))
        worker_id = worker.hello.worker_id
        self.ledger.report(worker_id, load.running)
        self._refresh(worker)
        unclaimed = {attempt for attempt in load.running if not self.ledger.holds(worker_id, *attempt)}
        votes = worker.strays.seen(unclaimed, load.attach_epoch, now)
        if votes is not None:
            effects.append(Voted(connection, *votes))
        return effects

    def worker_of(self, connection: int) -> Worker:
        """The worker of a stream. Raises InvalidRequest if its Hello has not come."""
        worker = self._connections.get(connection)
        if worker is None:
            raise InvalidRequest("a stream's first report must be hello", field="hello")
        return worker

    def connections(self) -> list[int]:
        """The streams of all attached workers."""
        return list(self._connections)

    # ---- leases -----------------------------------------------------------------

    def book(self, lease: Lease, placement: Placement, now: float) -> Worker:
        """The lease goes to the chosen worker, as its next attempt."""
        worker = self.workers.at(placement.slot)
        lease.granted(worker.hello, now)
        self._hold(lease, placement.uncached_tokens)
        worker.breaker.granted(lease.id, now)
        if worker.breaker.state is not State.CLOSED:
            self.workers.refresh_breakers(now)
        self._remember_home(lease)
        return worker

    def adopt(self, lease: Lease) -> None:
        """The lease runs already on its worker, which may not have attached yet."""
        self._hold(lease, prefill_tokens=0)

    def _hold(self, lease: Lease, prefill_tokens: float) -> None:
        demand = lease.demand
        charge = Charge(
            request_id=demand.request_id,
            attempt=lease.attempt,
            worker_id=lease.worker_id,
            prefill_tokens=prefill_tokens,
            blocks=demand.blocks(lease.emitted_tokens),
            sequences=demand.choices,
            cost=cost(prices_of(demand.pins.model), int(prefill_tokens), demand.output_left(lease.emitted_tokens)),
        )
        worker = self.workers.get(lease.worker_id)
        charge.reported = worker is not None and (charge.request_id, charge.attempt) in worker.running
        self.ledger.hold(charge)
        if worker is not None:
            self._refresh(worker)

    def refused(self, lease: Lease, event: Refused) -> None:
        """Nothing was computed: the charge ends at once, and the worker has no room until its next report."""
        self.ledger.drop(lease.worker_id, lease.demand.request_id, lease.attempt)
        worker = self.workers.get(lease.worker_id)
        if worker is not None:
            worker.breaker.left(lease.id)
            self.workers.set_full(worker)
            self._refresh(worker)
        if event.cause is RefusedCause.MISMATCH:
            lease.avoid |= {event.worker_id}

    def failed(self, lease: Lease, event: Failed, now: float) -> None:
        """The worker broke under the lease, or the request did there."""
        worker = self.workers.get(lease.worker_id)
        if worker is not None:
            self.workers.set_failed(worker, now)
        if worker is not None and event.kind.of_worker:
            worker.breaker.failed(lease.id, now)
            self.workers.refresh_breakers(now)
        self.release(lease)

    def release(self, lease: Lease, completed: bool = False) -> None:
        """The lease leaves its worker. `completed` = it ran to its end there."""
        key = (lease.worker_id, lease.demand.request_id, lease.attempt)
        worker = self.workers.get(lease.worker_id)
        if worker is None:
            self.ledger.drop(*key)
            return
        self.ledger.close(*key)
        if completed:
            worker.breaker.succeeded(lease.id)
        worker.breaker.left(lease.id)

    def home_of(self, lease: Lease) -> str:
        """The worker that the request's session used last; empty = none known."""
        return self._homes.get((lease.demand.tenant, lease.demand.session_id), "")

    def _remember_home(self, lease: Lease) -> None:
        if lease.demand.session_id:
            key = (lease.demand.tenant, lease.demand.session_id)
            self._homes[key] = lease.worker_id
            self._homes.move_to_end(key)
            if len(self._homes) > self._most_sessions:
                self._homes.popitem(last=False)

    def _refresh(self, worker: Worker) -> None:
        self.workers.set_pending(worker, self.ledger.pending(worker.hello.worker_id))
