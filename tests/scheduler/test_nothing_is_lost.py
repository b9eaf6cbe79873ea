"""Nothing is lost, whatever the order: random leases, workers and time."""

import itertools
from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mesh.errors import InvalidRequest, Overloaded
from scheduler.absence import AbsencePolicy
from scheduler.demand import Demand, Pins, Priority
from scheduler.dispatcher import Dispatcher, Policies
from scheduler.effects import Ended, Granted
from scheduler.leases import Failed, FailureKind, Finished, Open, Parked, Refused, State
from scheduler.queue import QueuePolicy
from scheduler.reports import Hello, Load


class Mesh(RuleBasedStateMachine):
    """Random leases, workers and time. A model keeps what each lease was told."""

    def __init__(self) -> None:
        super().__init__()
        queue = QueuePolicy(limit=12, batch_limit=6, tenant_limit=8, patience_s=(1, 2, 4))
        absence = AbsencePolicy(settle_s=0, no_worker_grace_s=2, unwell_grace_s=5, restart_grace_s=6)
        self.dispatcher = Dispatcher(Policies(queue=queue, absence=absence, most_failures=3), 0.0)
        self.now = 0.0
        self.numbers = itertools.count(1)
        self.connections: dict[int, dict] = {}
        self.open_leases: dict[int, Demand] = {}
        self.granted: dict[int, Granted] = {}
        self.ends: Counter[int] = Counter()
        self.running: dict[str, set[tuple[str, int]]] = {}

    def note(self, effects) -> None:
        for effect in effects:
            if isinstance(effect, Granted):
                assert effect.lease_id in self.open_leases, "a grant for a lease that is over"
                assert effect.lease_id not in self.granted, "a second grant without an event between"
                self.granted[effect.lease_id] = effect
                request_id = self.open_leases[effect.lease_id].request_id
                self.running.setdefault(effect.worker_id, set()).add((request_id, effect.attempt))
            elif isinstance(effect, Ended):
                self.forget(effect.lease_id)
                self.ends[effect.lease_id] += 1

    def forget(self, lease_id: int) -> None:
        demand = self.open_leases.pop(lease_id)
        granted = self.granted.pop(lease_id, None)
        if granted is not None:
            self.running.get(granted.worker_id, set()).discard((demand.request_id, granted.attempt))

    @rule(worker=st.sampled_from("ABC"), blocks=st.integers(16, 64))
    def attach(self, worker: str, blocks: int) -> None:
        connection = next(self.numbers)
        hello = Hello(worker, f"{worker}:1", Pins("tiny"), 512, blocks, 4)
        self.connections = {c: w for c, w in self.connections.items() if w["id"] != worker}
        self.note(self.dispatcher.attach(connection, hello, self.now))
        self.connections[connection] = {"id": worker, "seq": 0}
        self.report(connection)

    def report(self, connection: int, **given) -> None:
        worker = self.connections[connection]
        worker["seq"] += 1
        running = frozenset(self.running.get(worker["id"], ()))
        load = Load(worker["seq"], running, sequences=len(running), snapshot=worker["seq"] == 1, **given)
        self.note(self.dispatcher.load(connection, load, self.now))

    @precondition(lambda self: self.connections)
    @rule(data=st.data(), draining=st.booleans(), queued=st.integers(0, 600), committed=st.integers(0, 40))
    def load(self, data, draining: bool, queued: int, committed: int) -> None:
        connection = data.draw(st.sampled_from(sorted(self.connections)))
        self.report(connection, draining=draining, queued_prefill_tokens=queued, committed_blocks=committed)

    @precondition(lambda self: self.connections)
    @rule(data=st.data())
    def lose_a_worker(self, data) -> None:
        connection = data.draw(st.sampled_from(sorted(self.connections)))
        self.running.pop(self.connections.pop(connection)["id"], None)
        self.dispatcher.detach(connection)

    @rule(
        request=st.integers(0, 20),
        tenant=st.sampled_from("xy"),
        priority=st.sampled_from(Priority),
        prompt=st.integers(1, 600),
        most=st.integers(1, 64),
    )
    def open(self, request: int, tenant: str, priority: Priority, prompt: int, most: int) -> None:
        lease = next(self.numbers)
        demand = Demand(f"r{request}", tenant, Pins("tiny"), prompt, most, most, priority)
        self.open_leases[lease] = demand
        try:
            self.note(self.dispatcher.handle(lease, Open(demand), self.now))
        except (InvalidRequest, Overloaded):
            del self.open_leases[lease]

    @precondition(lambda self: self.granted)
    @rule(data=st.data(), kind=st.sampled_from(["refused", "failed", "step", "parked", "finished"]))
    def say(self, data, kind: str) -> None:
        lease = data.draw(st.sampled_from(sorted(self.granted)))
        granted = self.granted[lease]
        where = (granted.worker_id, granted.attempt)
        event = {
            "refused": Refused(*where),
            "failed": Failed(*where, FailureKind.RESET, 3),
            "step": Failed(*where, FailureKind.STEP_ERROR),
            "parked": Parked(*where, 3),
            "finished": Finished(granted.attempt),
        }[kind]
        self.running.get(granted.worker_id, set()).discard((self.open_leases[lease].request_id, granted.attempt))
        if kind != "finished":
            del self.granted[lease]
        self.note(self.dispatcher.handle(lease, event, self.now))

    @precondition(lambda self: self.open_leases)
    @rule(data=st.data())
    def hang_up(self, data) -> None:
        lease = data.draw(st.sampled_from(sorted(self.open_leases)))
        self.forget(lease)
        self.note(self.dispatcher.close(lease, self.now))

    @rule(seconds=st.floats(0, 3))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.note(self.dispatcher.tick(self.now))

    @invariant()
    def every_lease_waits_or_is_granted_or_has_ended_once(self) -> None:
        waiting = sum(stat.waiting for stat in self.dispatcher.queues(self.now))
        assert waiting == self.dispatcher.lease_count(State.QUEUED)
        assert self.dispatcher.lease_count(State.GRANTED) == len(self.granted)
        assert waiting + len(self.granted) == len(self.open_leases)
        assert all(count == 1 for count in self.ends.values())

    @invariant()
    def every_granted_lease_is_charged(self) -> None:
        ledger = self.dispatcher.fleet.ledger
        for lease, granted in self.granted.items():
            assert ledger.holds(granted.worker_id, self.open_leases[lease].request_id, granted.attempt)

    def teardown(self) -> None:
        """At idle nothing is left: no lease, no place, no charge."""
        for lease in list(self.open_leases):
            self.forget(lease)
            self.note(self.dispatcher.close(lease, self.now))
        for connection in list(self.connections):
            self.report(connection)
        assert len(self.dispatcher.fleet.ledger) == 0
        assert self.dispatcher.queues(self.now) == []
        assert all(self.dispatcher.lease_count(state) == 0 for state in State)
        rows = self.dispatcher.fleet.workers.rows
        assert not rows["pending_blocks"].any()
        assert not rows["pending_prefill_tokens"].any()


Mesh.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestNothingIsLost = Mesh.TestCase
