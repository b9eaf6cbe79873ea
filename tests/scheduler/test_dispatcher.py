"""Leases from open to end: what each event does, and that nothing is lost whatever the order."""

import itertools
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mesh.errors import Internal, InvalidRequest, Overloaded, ShoalError, Superseded, Unavailable
from scheduler.absence import AbsencePolicy
from scheduler.breaker import BreakerPolicy
from scheduler.demand import Demand, Pins, Priority
from scheduler.dispatcher import Dispatcher, Policies
from scheduler.effects import Disconnected, Ended, Granted, Requeued, SnapshotOrdered, Voted
from scheduler.leases import Adopt, Failed, FailureKind, Finished, Open, Parked, Refused, RefusedCause, State
from scheduler.prefixes import Tier
from scheduler.queue import QueuePolicy
from scheduler.reports import BlockChange, Hello, Load


class Bench:
    """A dispatcher, its workers and its time."""

    def __init__(self, make, **policies) -> None:
        self.make = make
        self.now = 0.0
        self.dispatcher = make.dispatcher(**policies)
        self._connections = itertools.count(100)
        self._seq: Counter[int] = Counter()
        self._leases = itertools.count(1)

    def attach(self, worker_id: str = "w1", load: dict | None = None, **hello) -> int:
        connection = next(self._connections)
        self.dispatcher.attach(connection, self.make.hello(worker_id, **hello), self.now)
        self.report(connection, **(load or {}))
        return connection

    def report(self, connection: int, *running: tuple[str, int], **load):
        self._seq[connection] += 1
        given = {"running": frozenset(running), "sequences": len(running)} | load
        return self.dispatcher.load(connection, self.make.load(self._seq[connection], **given), self.now)

    def open(self, request_id: str = "r1", opening: dict | None = None, **demand):
        """Lease number and effects."""
        lease = next(self._leases)
        event = Open(self.make.demand(request_id, **demand), **(opening or {}))
        return lease, self.dispatcher.handle(lease, event, self.now)

    def send(self, lease: int, event):
        return self.dispatcher.handle(lease, event, self.now)

    def tick(self, after_s: float = 0.0):
        self.now += after_s
        return self.dispatcher.tick(self.now)

    def charges(self) -> int:
        return len(self.dispatcher.fleet.ledger)


@pytest.fixture
def bench(make) -> Bench:
    return Bench(make)


def grants(effects) -> list[tuple[str, int]]:
    return [(e.worker_id, e.attempt) for e in effects if isinstance(e, Granted)]


def errors(effects) -> list[ShoalError | None]:
    return [e.error for e in effects if isinstance(e, Ended)]


def test_a_request_is_granted_at_once_where_there_is_room(bench) -> None:
    bench.attach()
    _, effects = bench.open()
    assert grants(effects) == [("w1", 1)]
    assert effects[0].queue_class == "normal/S"
    assert effects[0].waited_s == 0


def test_a_request_waits_for_room_and_its_grant_tells_how_long(bench) -> None:
    connection = bench.attach(load={"queued_prefill_tokens": 10_000})
    assert bench.open(opening={"waited_s": 2.0})[1] == []
    bench.now = 1.5
    (granted,) = bench.report(connection)
    assert (granted.waited_s, granted.ahead) == (3.5, 0)


def test_grants_in_one_round_fill_a_worker_no_further_than_its_room(bench) -> None:
    connection = bench.attach()
    # 1,000 tokens/s: 300 ms of room are 300 tokens; the first grant may pass it, the next may not.
    taken = [grants(bench.open(f"r{i}", prompt_tokens=160)[1]) for i in range(4)]
    assert taken == [[("w1", 1)], [("w1", 1)], [], []]
    assert len(grants(bench.report(connection, ("r0", 1), ("r1", 1)))) == 2


def test_committed_blocks_and_charges_never_exceed_the_pool(bench) -> None:
    bench.attach(total_blocks=16)
    # 64 + 32 tokens are 6 blocks: two fit, a third waits.
    taken = [len(grants(bench.open(f"r{i}", prompt_tokens=64)[1])) for i in range(3)]
    assert taken == [1, 1, 0]


def test_a_charge_ends_when_the_lease_is_closed_and_a_later_report_omits_it(bench) -> None:
    connection = bench.attach()
    lease, _ = bench.open()
    bench.report(connection, ("r1", 1))
    bench.dispatcher.close(lease, bench.now)
    assert bench.charges() == 1
    bench.report(connection, ("r1", 1))
    assert bench.charges() == 1
    bench.report(connection)
    assert bench.charges() == 0


def test_a_charge_holds_while_the_lease_is_open_though_a_report_omits_it(bench) -> None:
    connection = bench.attach()
    bench.open()
    bench.report(connection)
    assert bench.charges() == 1


def test_a_refused_request_goes_elsewhere_and_the_worker_is_full_until_its_next_report(bench) -> None:
    first = bench.attach("w1")
    lease, effects = bench.open()
    bench.attach("w2", load={"queued_prefill_tokens": 200})
    assert grants(effects) == [("w1", 1)]
    effects = bench.send(lease, Refused("w1", 1, RefusedCause.NO_ROOM))
    assert effects[0] == Requeued(lease, "refused_no_room")
    assert grants(effects) == [("w2", 2)]
    assert grants(bench.open("r2")[1]) == [("w2", 1)]
    bench.report(first)
    assert grants(bench.open("r3")[1]) == [("w1", 1)]


def test_a_request_refused_by_the_only_worker_waits_for_its_next_report_with_its_age(bench) -> None:
    connection = bench.attach()
    lease, _ = bench.open(opening={"waited_s": 1.0})
    assert grants(bench.send(lease, Refused("w1", 1))) == []
    bench.now = 2.0
    (granted,) = bench.report(connection)
    assert (granted.attempt, granted.waited_s) == (2, 3.0)


def test_a_mismatch_is_not_tried_on_that_worker_again(bench) -> None:
    first = bench.attach("w1")
    lease, _ = bench.open()
    bench.send(lease, Refused("w1", 1, RefusedCause.MISMATCH))
    assert grants(bench.report(first)) == []
    bench.attach("w2", load={"queued_prefill_tokens": 250})
    assert bench.dispatcher.lease_count(State.GRANTED) == 1


def test_a_failed_request_avoids_the_worker_even_when_it_is_the_best(bench) -> None:
    bench.attach("w1")
    lease, _ = bench.open()
    bench.attach("w2", load={"queued_prefill_tokens": 250})
    assert grants(bench.send(lease, Failed("w1", 1, FailureKind.RESET, 5))) == [("w2", 2)]


@pytest.mark.parametrize(("emitted", "goes_on"), [(0, "int8"), (1, "fp32")])
def test_an_answer_that_has_begun_never_changes_its_numerics(bench, emitted, goes_on) -> None:
    def pins(precision: str) -> Pins:
        return Pins("tiny", tokenizer_digest=b"t", precision=precision)

    bench.attach("first", pins=pins("fp32"))
    lease, _ = bench.open()
    bench.attach("int8", pins=pins("int8"))
    bench.attach("fp32", pins=pins("fp32"), load={"queued_prefill_tokens": 250})
    assert grants(bench.send(lease, Failed("first", 1, FailureKind.RESET, emitted))) == [(goes_on, 2)]


def test_a_step_error_is_tried_on_one_other_worker_at_most(bench) -> None:
    for worker_id in ("w1", "w2", "w3"):
        bench.attach(worker_id)
    lease, (granted,) = bench.open()
    effects = bench.send(lease, Failed(granted.worker_id, 1, FailureKind.STEP_ERROR))
    ((second, attempt),) = grants(effects)
    assert second != granted.worker_id
    (error,) = errors(bench.send(lease, Failed(second, attempt, FailureKind.STEP_ERROR)))
    assert isinstance(error, Internal)
    assert error.code == "step_error"


def test_a_step_error_on_the_only_worker_ends_the_request_at_once(bench) -> None:
    bench.attach()
    lease, _ = bench.open()
    (error,) = errors(bench.send(lease, Failed("w1", 1, FailureKind.STEP_ERROR)))
    assert error.code == "step_error"


def test_a_request_under_which_worker_after_worker_dies_is_given_up(make) -> None:
    bench = Bench(make, most_failures=3)
    for number in range(5):
        bench.attach(f"w{number}")
    lease, (granted,) = bench.open()
    worker, attempt = granted.worker_id, 1
    for _ in range(2):
        ((worker, attempt),) = grants(bench.send(lease, Failed(worker, attempt, FailureKind.RESET)))
    assert errors(bench.send(lease, Failed(worker, attempt, FailureKind.RESET)))[0].code == "step_error"


def test_only_failures_of_the_worker_feed_its_breaker(make) -> None:
    bench = Bench(make, breaker=BreakerPolicy(failures=1, open_s=1))
    bench.attach("w1")
    lease, _ = bench.open("r1")
    bench.send(lease, Failed("w1", 1, FailureKind.PROTOCOL))
    assert grants(bench.open("r2")[1]) == [("w1", 1)]
    bench.send(2, Failed("w1", 1, FailureKind.CONNECT))
    assert grants(bench.open("r3")[1]) == []


def test_an_open_breaker_lets_one_probe_through_and_closes_when_it_succeeds(make) -> None:
    bench = Bench(make, breaker=BreakerPolicy(failures=1, open_s=1))
    connection = bench.attach("w1")
    lease, _ = bench.open("r1")
    bench.send(lease, Failed("w1", 1, FailureKind.HUNG))
    bench.dispatcher.close(lease, bench.now)
    second, _ = bench.open("r2")
    third, _ = bench.open("r3")
    bench.now = 1.0
    bench.report(connection)
    assert grants(bench.tick()) == [("w1", 1)]
    assert bench.dispatcher.lease_count(State.QUEUED) == 1
    bench.send(second, Finished(1))
    assert [e.lease_id for e in bench.tick() if isinstance(e, Granted)] == [third]
    assert errors(bench.send(third, Finished(1))) == [None]


def test_a_parked_request_goes_on_with_what_it_has(bench) -> None:
    bench.attach()
    lease, _ = bench.open(block_keys=(b"a" * 16,))
    bench.dispatcher.fleet.workers.prefixes.store(0, Tier.DEVICE, [b"a" * 16, b"b" * 16])
    effects = bench.send(lease, Parked("w1", 1, emitted_tokens=8, more_block_keys=(b"b" * 16,)))
    granted = next(e for e in effects if isinstance(e, Granted))
    assert granted.attempt == 2
    assert granted.candidates[0].cached_tokens == (32, 0, 0)


def test_an_adopted_request_is_answered_at_once_though_its_worker_has_not_attached(bench) -> None:
    effects = bench.dispatcher.handle(9, Adopt(bench.make.demand(), "w1", "w1:1", attempt=4, waited_s=1.5), 0)
    (granted,) = effects
    assert (granted.worker_id, granted.address, granted.attempt, granted.adopted) == ("w1", "w1:1", 4, True)
    assert bench.charges() == 1
    connection = bench.attach("w1", load={"running": frozenset({("r1", 4)})}, total_blocks=4)
    assert bench.charges() == 1
    bench.attach("w2", load={"queued_prefill_tokens": 250})
    assert grants(bench.send(9, Failed("w1", 4, FailureKind.RESET))) == [("w2", 5)]
    bench.report(connection)
    bench.dispatcher.close(9, 0)
    assert bench.charges() == 1


def test_an_adopted_request_keeps_clear_of_workers_under_which_it_failed_before(bench) -> None:
    bench.attach("w1")
    adopt = Adopt(bench.make.demand(), "w2", "w2:1", attempt=2, avoid=frozenset({"w1"}))
    bench.dispatcher.handle(9, adopt, 0)
    bench.attach("w3", load={"queued_prefill_tokens": 250})
    assert grants(bench.send(9, Failed("w2", 2, FailureKind.RESET))) == [("w3", 3)]


def test_an_adopted_charge_takes_its_room_before_the_worker_has_named_it(bench) -> None:
    bench.dispatcher.handle(9, Adopt(bench.make.demand(prompt_tokens=96), "w1", "w1:1", attempt=1), 0)
    bench.attach("w1", total_blocks=8)
    assert grants(bench.open("r2")[1]) == []


def test_the_charge_of_an_adopted_request_whose_worker_never_comes_ends_with_the_lease(bench) -> None:
    bench.dispatcher.handle(9, Adopt(bench.make.demand(), "w1", "w1:1", attempt=4), 0)
    bench.dispatcher.close(9, 0)
    assert bench.charges() == 0


def test_a_second_lease_of_a_request_replaces_the_first_and_numbers_on(bench) -> None:
    bench.attach()
    first, _ = bench.open()
    _, effects = bench.open()
    assert [(e.lease_id, type(e.error)) for e in effects if isinstance(e, Ended)] == [(first, Superseded)]
    assert grants(effects) == [("w1", 2)]
    assert bench.dispatcher.close(first, 0) == []
    assert bench.dispatcher.lease_count(State.GRANTED) == 1


def test_attempts_are_numbered_above_the_highest_ever_granted(bench) -> None:
    bench.attach()
    _, effects = bench.open(opening={"last_attempt": 7})
    assert grants(effects) == [("w1", 8)]


@pytest.mark.parametrize(
    ("event", "field"),
    [
        (Refused("w2", 1), "refused.worker_id"),
        (Failed("w1", 2, FailureKind.RESET), "failed.attempt"),
        (Parked("w1", 0), "parked.attempt"),
        (Finished(3), "finished.attempt"),
    ],
)
def test_an_event_that_does_not_fit_the_grant_names_its_field_and_changes_nothing(bench, event, field) -> None:
    bench.attach()
    lease, _ = bench.open()
    with pytest.raises(InvalidRequest) as raised:
        bench.send(lease, event)
    assert raised.value.field == field
    assert bench.dispatcher.lease_count(State.GRANTED) == 1


def test_events_out_of_order_are_refused(bench) -> None:
    with pytest.raises(InvalidRequest, match="first event"):
        bench.send(5, Finished(1))
    lease, _ = bench.open()
    with pytest.raises(InvalidRequest, match="queued"):
        bench.send(lease, Refused("w1", 1))
    with pytest.raises(InvalidRequest, match="once"):
        bench.send(lease, Open(bench.make.demand("other")))


def test_without_a_worker_a_request_ends_after_the_grace_and_not_before(bench) -> None:
    bench.open()
    assert bench.tick() == []
    assert bench.tick(1.9) == []
    (error,) = errors(bench.tick(0.2))
    assert isinstance(error, Unavailable)
    assert (error.code, error.retry_after_s) == ("no_worker", 5)


def test_the_grace_begins_when_the_replica_has_settled(make) -> None:
    bench = Bench(make, absence=AbsencePolicy(settle_s=3, no_worker_grace_s=2))
    bench.open()
    for _ in range(48):
        assert bench.tick(0.1) == []
    bench.attach()
    assert bench.tick(5) == []


def test_a_request_that_avoids_or_pins_away_every_worker_ends_with_no_worker(bench) -> None:
    connection = bench.attach()
    bench.open("avoids", opening={"avoid": frozenset({"w1"})})
    bench.open("pinned", pins=Pins("tiny", tokenizer_digest=b"t", precision="int4"))
    bench.tick()
    bench.now = 2.5
    bench.report(connection)
    assert [error.code for error in errors(bench.tick())] == ["no_worker"] * 2


def test_a_request_whose_workers_are_all_unwell_waits_longer_and_not_for_ever(bench) -> None:
    connection = bench.attach(load={"healthy": False})
    bench.open()
    for _ in range(14):
        assert bench.tick(1) == []
        bench.report(connection, healthy=False)
    bench.tick(1)
    assert [error.code for error in errors(bench.tick(1))] == ["no_worker"]


def test_a_request_that_fits_no_worker_is_refused_at_once_or_when_that_shows(bench) -> None:
    bench.open("early", max_tokens=5_000)
    bench.attach()
    assert [error.field for error in errors(bench.tick())] == ["max_tokens"]
    with pytest.raises(InvalidRequest) as raised:
        bench.open("late", prompt_tokens=2_048)
    assert raised.value.field == "prompt"


def test_a_full_queue_says_when_to_come_back(make) -> None:
    bench = Bench(make, queue=QueuePolicy(limit=2))
    bench.open("r1")
    bench.open("r2")
    with pytest.raises(Overloaded) as raised:
        bench.open("r3")
    assert raised.value.code == "queue_full"
    assert raised.value.retry_after_s >= 1


def test_a_request_that_waited_elsewhere_is_taken_in_though_the_queue_is_full(make) -> None:
    bench = Bench(make, queue=QueuePolicy(limit=1))
    bench.open("r1")
    bench.open("r2", opening={"waited_s": 0.5})
    assert bench.dispatcher.lease_count(State.QUEUED) == 2


def test_the_wait_that_a_full_queue_tells_is_long_enough_at_a_steady_pace(make) -> None:
    bench = Bench(make, queue=QueuePolicy(limit=20))
    connection = bench.attach(load={"queued_prefill_tokens": 10_000})
    numbers = itertools.count()

    def grant_one() -> None:
        """One every 500 ms: it fills the worker, is over, and the worker is busy with something else again."""
        bench.now += 0.5
        (granted,) = [e for e in bench.report(connection) if isinstance(e, Granted)]
        bench.dispatcher.close(granted.lease_id, bench.now)
        bench.report(connection, queued_prefill_tokens=10_000)

    for _ in range(80):
        while bench.dispatcher.lease_count(State.QUEUED) < 20:
            bench.open(f"r{next(numbers)}", prompt_tokens=300)
        grant_one()
    bench.open(f"r{next(numbers)}", prompt_tokens=300)
    with pytest.raises(Overloaded) as raised:
        bench.open("refused", prompt_tokens=300)
    assert 5 <= raised.value.retry_after_s <= 15
    until = bench.now + raised.value.retry_after_s
    while bench.now < until:
        if not bench.dispatcher.lease_count(State.QUEUED):
            break
        grant_one()
    bench.open("refused", prompt_tokens=300)


def test_a_worker_that_leaves_is_given_nothing_and_its_requests_go_elsewhere(bench) -> None:
    connection = bench.attach("w1")
    lease, _ = bench.open()
    bench.dispatcher.detach(connection)
    assert grants(bench.open("r2")[1]) == []
    bench.attach("w2")
    assert bench.dispatcher.lease_count(State.GRANTED) == 2
    assert grants(bench.send(lease, Failed("w1", 1, FailureKind.RESET))) == [("w2", 2)]


def test_a_worker_that_attaches_again_replaces_itself_and_keeps_its_charges(bench) -> None:
    first = bench.attach("w1")
    bench.open()
    effects = bench.dispatcher.attach(7, bench.make.hello("w1"), bench.now)
    assert [(e.connection, type(e.error)) for e in effects if isinstance(e, Disconnected)] == [(first, Superseded)]
    bench.dispatcher.detach(first)
    assert len(bench.dispatcher.fleet.workers) == 1
    assert bench.charges() == 1


def test_a_gap_orders_one_snapshot_and_the_snapshot_replaces_what_was_known(bench, make) -> None:
    connection = bench.attach()
    a, b, c = (bytes([i]) * 16 for i in range(3))
    dispatcher = bench.dispatcher

    def load(seq: int, **given):
        return [e for e in dispatcher.load(connection, make.load(seq, **given), 0) if isinstance(e, SnapshotOrdered)]

    assert load(2, blocks=(BlockChange(Tier.DEVICE, (a,)),)) == []
    assert load(4) == [SnapshotOrdered(connection)]
    assert load(6) == []
    assert load(7, snapshot=True, snapshot_more=True, blocks=(BlockChange(Tier.DEVICE, (b,)),)) == []
    assert load(8, blocks=(BlockChange(Tier.DEVICE, (c,)),)) == []
    leading = dispatcher.fleet.workers.prefixes.leading
    assert [leading([key], 8)[Tier.DEVICE, 0] for key in (a, b, c)] == [0, 1, 1]
    assert load(10) == [SnapshotOrdered(connection)]


def test_a_repeated_report_changes_nothing(bench, make) -> None:
    connection = bench.attach()
    bench.dispatcher.load(connection, make.load(1, draining=True), 0)
    assert grants(bench.open()[1]) == [("w1", 1)]


def test_an_attempt_without_a_lease_is_voted_out_after_ten_seconds_and_an_adopt_takes_it_back(bench) -> None:
    connection = bench.attach()

    def votes(attach_epoch: int = 0) -> list[Voted]:
        return [e for e in bench.report(connection, ("r1", 3), attach_epoch=attach_epoch) if isinstance(e, Voted)]

    assert votes() == []
    bench.now = 9.9
    assert votes() == []
    bench.now = 10.0
    assert votes() == [Voted(connection, 0, frozenset({("r1", 3)}))]
    bench.dispatcher.handle(9, Adopt(bench.make.demand(), "w1", "w1:1", attempt=3), 10)
    assert votes() == [Voted(connection, 0, frozenset())]


def test_a_lease_on_another_attempt_does_not_claim_a_stray(bench) -> None:
    connection = bench.attach()
    bench.dispatcher.handle(9, Adopt(bench.make.demand(), "w1", "w1:1", attempt=4), 0)
    bench.report(connection, ("r1", 3))
    bench.now = 10.0
    assert [e.attempts for e in bench.report(connection, ("r1", 3)) if isinstance(e, Voted)] == [{("r1", 3)}]


def test_draining_sends_everybody_elsewhere_and_takes_nothing_new(bench) -> None:
    connection = bench.attach()
    bench.open("running")
    bench.open("queued", pins=Pins("other"))
    effects = bench.dispatcher.drain()
    assert [error.code for error in errors(effects)] == ["draining"] * 2
    assert [e.connection for e in effects if isinstance(e, Disconnected)] == [connection]
    for event in (Open(bench.make.demand("new")), Adopt(bench.make.demand("new"), "w1", "w1:1", 1)):
        with pytest.raises(Unavailable) as raised:
            bench.send(50, event)
        assert raised.value.code == "draining"


def test_a_session_returns_to_its_worker_among_equals_and_tenants_do_not_share_sessions(bench) -> None:
    bench.attach("calm")
    bench.attach("loaded", load={"sequences": 2})
    _, effects = bench.open("r1", opening={"avoid": frozenset({"calm"})}, prompt_tokens=1, session_id="s")
    assert grants(effects) == [("loaded", 1)]
    _, (granted,) = bench.open("r2", prompt_tokens=1, session_id="s")
    assert (granted.worker_id, granted.reason) == ("loaded", "session affinity")
    _, (granted,) = bench.open("r3", prompt_tokens=1, session_id="s", tenant="b")
    assert granted.worker_id == "calm"


def test_an_overdue_request_gets_a_worker_held_for_it_so_that_small_ones_cannot_starve_it(bench) -> None:
    connection = bench.attach(total_blocks=64)
    running = {f"small{i}": 4 for i in range(16)}

    def report():
        committed = sum(running.values())
        return bench.report(connection, *((name, 1) for name in running), committed_blocks=committed, sequences=4)

    report()
    large, _ = bench.open("large", prompt_tokens=900, priority=Priority.BATCH)
    numbers, names = itertools.count(100), {}
    for second in range(400):
        bench.now = float(second)
        name = f"s{next(numbers)}"
        names[bench.open(name, prompt_tokens=32, priority=Priority.HIGH)[0]] = name
        bench.tick()
        if running:
            del running[next(iter(running))]
        for effect in report():
            if isinstance(effect, Granted):
                if effect.lease_id == large:
                    assert second >= 60
                    return
                running[names[effect.lease_id]] = 4
    pytest.fail("the large request was never granted")


# ---- nothing is lost, whatever happens ------------------------------------------------------


class Mesh(RuleBasedStateMachine):
    """Random leases, workers and time. A model keeps what each lease was told."""

    def __init__(self) -> None:
        super().__init__()
        queue = QueuePolicy(limit=12, batch_limit=6, tenant_limit=8, patience_s=(1, 2, 4))
        absence = AbsencePolicy(settle_s=0, no_worker_grace_s=2, unwell_grace_s=5)
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


def test_a_request_whose_numbers_cannot_be_reckoned_with_stops_no_other(make) -> None:
    dispatcher = make.dispatcher()
    dispatcher.attach(1, make.hello(), 0)
    dispatcher.load(1, make.load(), 0)
    absurd = make.demand("absurd", expected_tokens=1 << 80)
    assert dispatcher.handle(1, Open(absurd), 0) == []
    effects = dispatcher.handle(2, Open(make.demand("good")), 0)
    assert [effect.lease_id for effect in effects] == [2]
    assert dispatcher.tick(0.1) == []
