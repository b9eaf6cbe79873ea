"""Grants and charges: who gets a worker when, and what a worker holds because of it."""

import itertools

import pytest

from scheduler.demand import Priority
from scheduler.effects import Granted
from scheduler.leases import Open


def test_a_request_is_granted_at_once_where_there_is_room(bench) -> None:
    bench.attach()
    _, effects = bench.open()
    assert bench.grants(effects) == [("w1", 1)]
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
    taken = [bench.grants(bench.open(f"r{i}", prompt_tokens=160)[1]) for i in range(4)]
    assert taken == [[("w1", 1)], [("w1", 1)], [], []]
    assert len(bench.grants(bench.report(connection, ("r0", 1), ("r1", 1)))) == 2


def test_committed_blocks_and_charges_never_exceed_the_pool(bench) -> None:
    bench.attach(total_blocks=16)
    # 64 + 32 tokens are 6 blocks: two fit, a third waits.
    taken = [len(bench.grants(bench.open(f"r{i}", prompt_tokens=64)[1])) for i in range(3)]
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


def test_a_session_returns_to_its_worker_among_equals_and_tenants_do_not_share_sessions(bench) -> None:
    bench.attach("calm")
    bench.attach("loaded", load={"sequences": 2})
    _, effects = bench.open("r1", opening={"avoid": frozenset({"calm"})}, prompt_tokens=1, session_id="s")
    assert bench.grants(effects) == [("loaded", 1)]
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


def test_a_request_whose_numbers_cannot_be_reckoned_with_stops_no_other(make) -> None:
    dispatcher = make.dispatcher()
    dispatcher.attach(1, make.hello(), 0)
    dispatcher.load(1, make.load(), 0)
    absurd = make.demand("absurd", expected_tokens=1 << 80)
    assert dispatcher.handle(1, Open(absurd), 0) == []
    effects = dispatcher.handle(2, Open(make.demand("good")), 0)
    assert [effect.lease_id for effect in effects] == [2]
    assert dispatcher.tick(0.1) == []
