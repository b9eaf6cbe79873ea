"""What each event of a granted lease does: refused, failed, parked, finished; and the breakers that failures feed."""

import pytest

from mesh.errors import Internal, InvalidRequest
from scheduler.breaker import BreakerPolicy
from scheduler.demand import Pins
from scheduler.effects import Granted, Requeued
from scheduler.leases import Failed, FailureKind, Finished, Open, Parked, Refused, RefusedCause, State
from scheduler.prefixes import Tier


def test_a_refused_request_goes_elsewhere_and_the_worker_is_full_until_its_next_report(bench) -> None:
    first = bench.attach("w1")
    lease, effects = bench.open()
    bench.attach("w2", load={"queued_prefill_tokens": 200})
    assert bench.grants(effects) == [("w1", 1)]
    effects = bench.send(lease, Refused("w1", 1, RefusedCause.NO_ROOM))
    assert effects[0] == Requeued(lease, "refused_no_room")
    assert bench.grants(effects) == [("w2", 2)]
    assert bench.grants(bench.open("r2")[1]) == [("w2", 1)]
    bench.report(first)
    assert bench.grants(bench.open("r3")[1]) == [("w1", 1)]


def test_a_request_refused_by_the_only_worker_waits_for_its_next_report_with_its_age(bench) -> None:
    connection = bench.attach()
    lease, _ = bench.open(opening={"waited_s": 1.0})
    assert bench.grants(bench.send(lease, Refused("w1", 1))) == []
    bench.now = 2.0
    (granted,) = bench.report(connection)
    assert (granted.attempt, granted.waited_s) == (2, 3.0)


def test_a_mismatch_is_not_tried_on_that_worker_again(bench) -> None:
    first = bench.attach("w1")
    lease, _ = bench.open()
    bench.send(lease, Refused("w1", 1, RefusedCause.MISMATCH))
    assert bench.grants(bench.report(first)) == []
    bench.attach("w2", load={"queued_prefill_tokens": 250})
    assert bench.dispatcher.lease_count(State.GRANTED) == 1


def test_a_failed_request_avoids_the_worker_even_when_it_is_the_best(bench) -> None:
    bench.attach("w1")
    lease, _ = bench.open()
    bench.attach("w2", load={"queued_prefill_tokens": 250})
    assert bench.grants(bench.send(lease, Failed("w1", 1, FailureKind.RESET, 5))) == [("w2", 2)]


@pytest.mark.parametrize(("emitted", "goes_on"), [(0, "int8"), (1, "fp32")])
def test_an_answer_that_has_begun_never_changes_its_numerics(bench, emitted, goes_on) -> None:
    def pins(precision: str) -> Pins:
        return Pins("tiny", tokenizer_digest=b"t", precision=precision)

    bench.attach("first", pins=pins("fp32"))
    lease, _ = bench.open()
    bench.attach("int8", pins=pins("int8"))
    bench.attach("fp32", pins=pins("fp32"), load={"queued_prefill_tokens": 250})
    assert bench.grants(bench.send(lease, Failed("first", 1, FailureKind.RESET, emitted))) == [(goes_on, 2)]


def test_a_step_error_is_tried_on_one_other_worker_at_most(bench) -> None:
    for worker_id in ("w1", "w2", "w3"):
        bench.attach(worker_id)
    lease, (granted,) = bench.open()
    effects = bench.send(lease, Failed(granted.worker_id, 1, FailureKind.STEP_ERROR))
    ((second, attempt),) = bench.grants(effects)
    assert second != granted.worker_id
    (error,) = bench.errors(bench.send(lease, Failed(second, attempt, FailureKind.STEP_ERROR)))
    assert isinstance(error, Internal)
    assert error.code == "step_error"


def test_a_step_error_on_the_only_worker_ends_the_request_at_once(bench) -> None:
    bench.attach()
    lease, _ = bench.open()
    (error,) = bench.errors(bench.send(lease, Failed("w1", 1, FailureKind.STEP_ERROR)))
    assert error.code == "step_error"


def test_a_request_under_which_worker_after_worker_dies_is_given_up(make) -> None:
    bench = make.bench(most_failures=3)
    for number in range(5):
        bench.attach(f"w{number}")
    lease, (granted,) = bench.open()
    worker, attempt = granted.worker_id, 1
    for _ in range(2):
        ((worker, attempt),) = bench.grants(bench.send(lease, Failed(worker, attempt, FailureKind.RESET)))
    assert bench.errors(bench.send(lease, Failed(worker, attempt, FailureKind.RESET)))[0].code == "step_error"


def test_only_failures_of_the_worker_feed_its_breaker(make) -> None:
    bench = make.bench(breaker=BreakerPolicy(failures=1, open_s=1))
    bench.attach("w1")
    lease, _ = bench.open("r1")
    bench.send(lease, Failed("w1", 1, FailureKind.PROTOCOL))
    assert bench.grants(bench.open("r2")[1]) == [("w1", 1)]
    bench.send(2, Failed("w1", 1, FailureKind.CONNECT))
    assert bench.grants(bench.open("r3")[1]) == []


def test_an_open_breaker_lets_one_probe_through_and_closes_when_it_succeeds(make) -> None:
    bench = make.bench(breaker=BreakerPolicy(failures=1, open_s=1))
    connection = bench.attach("w1")
    lease, _ = bench.open("r1")
    bench.send(lease, Failed("w1", 1, FailureKind.HUNG))
    bench.dispatcher.close(lease, bench.now)
    second, _ = bench.open("r2")
    third, _ = bench.open("r3")
    bench.now = 1.0
    bench.report(connection)
    assert bench.grants(bench.tick()) == [("w1", 1)]
    assert bench.dispatcher.lease_count(State.QUEUED) == 1
    bench.send(second, Finished(1))
    assert [e.lease_id for e in bench.tick() if isinstance(e, Granted)] == [third]
    assert bench.errors(bench.send(third, Finished(1))) == [None]


def test_a_parked_request_goes_on_with_what_it_has(bench) -> None:
    bench.attach()
    lease, _ = bench.open(block_keys=(b"a" * 16,))
    bench.dispatcher.fleet.workers.prefixes.store(0, Tier.DEVICE, [b"a" * 16, b"b" * 16])
    effects = bench.send(lease, Parked("w1", 1, emitted_tokens=8, more_block_keys=(b"b" * 16,)))
    granted = next(e for e in effects if isinstance(e, Granted))
    assert granted.attempt == 2
    assert granted.candidates[0].cached_tokens == (32, 0, 0)


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
