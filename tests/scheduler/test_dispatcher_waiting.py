"""Requests that find no worker or no place: how long they wait, and what they are told."""

import itertools

import pytest

from mesh.errors import InvalidRequest, Overloaded, Unavailable
from scheduler.absence import AbsencePolicy
from scheduler.demand import Pins
from scheduler.effects import Granted
from scheduler.leases import Refused, RefusedCause, State
from scheduler.queue import QueuePolicy


def test_without_a_worker_a_request_ends_after_the_grace_and_not_before(bench) -> None:
    bench.open()
    assert bench.tick() == []
    assert bench.tick(1.9) == []
    (error,) = bench.errors(bench.tick(0.2))
    assert isinstance(error, Unavailable)
    assert (error.code, error.retry_after_s) == ("no_worker", 5)


def test_the_grace_begins_when_the_replica_has_settled(make) -> None:
    bench = make.bench(absence=AbsencePolicy(settle_s=3, no_worker_grace_s=2))
    bench.open()
    for _ in range(48):
        assert bench.tick(0.1) == []
    bench.attach()
    assert bench.tick(5) == []


def test_a_request_that_avoids_or_pins_away_every_worker_ends_with_no_worker(bench) -> None:
    connection = bench.attach()
    lease, _ = bench.open("avoids")
    bench.send(lease, Refused("w1", 1, RefusedCause.MISMATCH))
    bench.open("pinned", pins=Pins("tiny", tokenizer_digest=b"t", precision="int4"))
    bench.tick()
    bench.now = 2.5
    bench.report(connection)
    assert [error.code for error in bench.errors(bench.tick())] == ["no_worker"] * 2


def test_a_request_whose_workers_are_all_unwell_waits_longer_and_not_for_ever(bench) -> None:
    connection = bench.attach(load={"healthy": False})
    bench.open()
    for _ in range(14):
        assert bench.tick(1) == []
        bench.report(connection, healthy=False)
    bench.tick(1)
    assert [error.code for error in bench.errors(bench.tick(1))] == ["no_worker"]


def test_a_request_that_fits_no_worker_is_refused_at_once_or_when_that_shows(bench) -> None:
    bench.open("early", max_tokens=5_000)
    bench.attach()
    assert [error.field for error in bench.errors(bench.tick())] == ["max_tokens"]
    with pytest.raises(InvalidRequest) as raised:
        bench.open("late", prompt_tokens=2_048)
    assert raised.value.field == "prompt"


def test_a_full_queue_says_when_to_come_back(make) -> None:
    bench = make.bench(queue=QueuePolicy(limit=2))
    bench.open("r1")
    bench.open("r2")
    with pytest.raises(Overloaded) as raised:
        bench.open("r3")
    assert raised.value.code == "queue_full"
    assert raised.value.retry_after_s >= 1


def test_a_request_that_waited_elsewhere_is_taken_in_though_the_queue_is_full(make) -> None:
    bench = make.bench(queue=QueuePolicy(limit=1))
    bench.open("r1")
    bench.open("r2", opening={"waited_s": 0.5})
    assert bench.dispatcher.lease_count(State.QUEUED) == 2


def test_the_wait_that_a_full_queue_tells_is_long_enough_at_a_steady_pace(make) -> None:
    bench = make.bench(queue=QueuePolicy(limit=20))
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
