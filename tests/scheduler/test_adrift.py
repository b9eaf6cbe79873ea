"""Answers that their worker lost: how long they wait for one, which may have them, and who goes first."""

import pytest

from scheduler.breaker import BreakerPolicy
from scheduler.effects import Ended, Granted
from scheduler.leases import Failed, FailureKind, Parked, State

TICK_S = 0.1


def pass_time(bench, seconds: float, reports: dict[int, dict] | None = None) -> list:
    """Effects of so many seconds. `reports` = what the worker of each connection keeps saying; {} = that it is well."""
    effects = []
    for _ in range(round(seconds / TICK_S)):
        bench.now += TICK_S
        for connection, load in (reports or {}).items():
            effects += bench.report(connection, **load)
        effects += bench.tick()
    return effects


def lose_the_only_worker(bench, lease: int, connection: int) -> None:
    bench.dispatcher.detach(connection)
    assert bench.grants(bench.send(lease, Failed("w1", 1, FailureKind.RESET, 5))) == []


def test_an_answer_waits_for_a_restart_where_a_new_request_is_told_to_come_back(bench) -> None:
    connection = bench.attach()
    lease, _ = bench.open()
    lose_the_only_worker(bench, lease, connection)
    new, _ = bench.open("new")
    assert [effect.lease_id for effect in pass_time(bench, 20)] == [new]
    again = bench.attach("w1-again")
    assert bench.dispatcher.lease_count(State.GRANTED) == 1
    assert bench.report(again) == []


@pytest.mark.parametrize("event", [Failed("w1", 1, FailureKind.RESET, 5), Parked("w1", 1, 5)], ids=["failed", "parked"])
def test_the_wait_for_a_worker_is_bounded_and_gives_everything_back(bench, event) -> None:
    connection = bench.attach()
    lease, _ = bench.open()
    bench.dispatcher.detach(connection)
    bench.send(lease, event)
    assert pass_time(bench, 29.9) == []
    (error,) = bench.errors(pass_time(bench, 0.3))
    assert (error.code, error.message) == ("no_worker", "no worker of tiny came within 30 s")
    assert (bench.charges(), bench.dispatcher.queues(bench.now)) == (0, [])


def test_the_wait_is_bounded_though_the_worker_stays_attached_and_unwell(bench) -> None:
    connection = bench.attach()
    lease, _ = bench.open()
    bench.send(lease, Failed("w1", 1, FailureKind.HUNG, 5))
    unwell = {connection: {"healthy": False}}
    assert pass_time(bench, 29.9, unwell) == []
    assert [error.code for error in bench.errors(pass_time(bench, 0.3, unwell))] == ["no_worker"]


def test_an_answer_that_waited_long_for_room_outlasts_a_moment_in_which_no_worker_is_well(bench) -> None:
    connection = bench.attach()
    lease, _ = bench.open()
    bench.send(lease, Failed("w1", 1, FailureKind.HUNG, 5))
    assert pass_time(bench, 40, {connection: {"refuses": True}}) == []
    assert pass_time(bench, 1, {connection: {"healthy": False}}) == []
    assert bench.grants(bench.report(connection)) == [("w1", 2)]


def test_a_replica_that_never_knew_the_worker_counts_the_wait_from_its_beginning(bench) -> None:
    bench.open(opening={"waited_s": 20.0, "emitted_tokens": 5, "last_attempt": 1, "avoid": frozenset({"w1"})})
    assert pass_time(bench, 9.9) == []
    assert len(bench.errors(pass_time(bench, 0.3))) == 1


def test_a_worker_that_was_silent_and_is_well_again_goes_on_with_the_answer(bench) -> None:
    connection = bench.attach()
    lease, _ = bench.open()
    bench.send(lease, Failed("w1", 1, FailureKind.HUNG, 5))
    assert pass_time(bench, 4, {connection: {"healthy": False}}) == []
    assert bench.grants(bench.report(connection)) == [("w1", 2)]


def test_a_worker_that_says_it_is_well_is_not_believed_at_once(bench) -> None:
    connection = bench.attach()
    lease, _ = bench.open()
    bench.send(lease, Failed("w1", 1, FailureKind.CONNECT, 5))
    assert pass_time(bench, 0.9, {connection: {}}) == []
    assert bench.grants(pass_time(bench, 0.2, {connection: {}})) == [("w1", 2)]


def test_an_answer_waits_for_room_elsewhere_rather_than_for_the_worker_that_broke_under_it(bench) -> None:
    first = bench.attach("w1")
    lease, _ = bench.open()
    second = bench.attach("w2", load={"refuses": True})
    bench.send(lease, Failed("w1", 1, FailureKind.RESET, 5))
    assert pass_time(bench, 5, {first: {}, second: {"refuses": True}}) == []
    assert bench.grants(bench.report(second)) == [("w2", 2)]


def test_what_failed_in_a_step_never_goes_back_there(bench) -> None:
    first = bench.attach("w1")
    lease, _ = bench.open()
    second = bench.attach("w2", load={"healthy": False})
    bench.send(lease, Failed("w1", 1, FailureKind.STEP_ERROR, 5))
    effects = pass_time(bench, 31, {first: {}, second: {"healthy": False}})
    assert [type(effect) for effect in effects] == [Ended]


def test_an_answer_goes_before_all_new_requests_of_its_priority_when_a_worker_comes(bench) -> None:
    connection = bench.attach(max_sequences=1)
    lease, _ = bench.open("begun", tenant="b", max_tokens=1_500, expected_tokens=1_500)
    lose_the_only_worker(bench, lease, connection)
    news = [bench.open(f"new{number}", tenant=tenant)[0] for number, tenant in enumerate("aabb")]
    bench.dispatcher.attach(99, bench.make.hello("w2"), bench.now)
    effects = bench.dispatcher.load(99, bench.make.load(), bench.now)
    granted = [effect.lease_id for effect in effects if isinstance(effect, Granted)]
    assert granted[0] == lease
    assert set(granted[1:]) <= set(news)


def test_a_worker_back_from_a_pause_has_all_its_answers_again_before_the_first_has_ended(make) -> None:
    bench = make.bench(breaker=BreakerPolicy(failures=3, open_s=2))
    connection = bench.attach()
    leases = [bench.open(f"r{number}")[0] for number in range(6)]
    for lease in leases:
        bench.send(lease, Failed("w1", 1, FailureKind.HUNG, 5))
    probe = pass_time(bench, 3, {connection: {}})
    assert [effect.attempt for effect in probe] == [2], "one first, to see whether it holds"
    rest = pass_time(bench, 2, {connection: {}})
    assert {effect.lease_id for effect in [*probe, *rest]} == set(leases)
