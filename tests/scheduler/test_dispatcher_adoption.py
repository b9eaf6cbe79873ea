"""Leases that come from elsewhere: adopted, replaced, numbered on; and attempts that no lease claims."""

from mesh.errors import Superseded
from scheduler.effects import Ended, Voted
from scheduler.leases import Adopt, Failed, FailureKind, State


def test_an_adopted_request_is_answered_at_once_though_its_worker_has_not_attached(bench) -> None:
    effects = bench.dispatcher.handle(9, Adopt(bench.make.demand(), "w1", "w1:1", attempt=4, waited_s=1.5), 0)
    (granted,) = effects
    assert (granted.worker_id, granted.address, granted.attempt, granted.adopted) == ("w1", "w1:1", 4, True)
    assert bench.charges() == 1
    connection = bench.attach("w1", load={"running": frozenset({("r1", 4)})}, total_blocks=4)
    assert bench.charges() == 1
    bench.attach("w2", load={"queued_prefill_tokens": 250})
    assert bench.grants(bench.send(9, Failed("w1", 4, FailureKind.RESET))) == [("w2", 5)]
    bench.report(connection)
    bench.dispatcher.close(9, 0)
    assert bench.charges() == 1


def test_an_adopted_request_keeps_clear_of_workers_under_which_it_failed_before(bench) -> None:
    bench.attach("w1")
    adopt = Adopt(bench.make.demand(), "w2", "w2:1", attempt=2, avoid=frozenset({"w1"}))
    bench.dispatcher.handle(9, adopt, 0)
    bench.attach("w3", load={"queued_prefill_tokens": 250})
    assert bench.grants(bench.send(9, Failed("w2", 2, FailureKind.RESET))) == [("w3", 3)]


def test_an_adopted_charge_takes_its_room_before_the_worker_has_named_it(bench) -> None:
    bench.dispatcher.handle(9, Adopt(bench.make.demand(prompt_tokens=96), "w1", "w1:1", attempt=1), 0)
    bench.attach("w1", total_blocks=8)
    assert bench.grants(bench.open("r2")[1]) == []


def test_the_charge_of_an_adopted_request_whose_worker_never_comes_ends_with_the_lease(bench) -> None:
    bench.dispatcher.handle(9, Adopt(bench.make.demand(), "w1", "w1:1", attempt=4), 0)
    bench.dispatcher.close(9, 0)
    assert bench.charges() == 0


def test_a_second_lease_of_a_request_replaces_the_first_and_numbers_on(bench) -> None:
    bench.attach()
    first, _ = bench.open()
    _, effects = bench.open()
    assert [(e.lease_id, type(e.error)) for e in effects if isinstance(e, Ended)] == [(first, Superseded)]
    assert bench.grants(effects) == [("w1", 2)]
    assert bench.dispatcher.close(first, 0) == []
    assert bench.dispatcher.lease_count(State.GRANTED) == 1


def test_attempts_are_numbered_above_the_highest_ever_granted(bench) -> None:
    bench.attach()
    _, effects = bench.open(opening={"last_attempt": 7})
    assert bench.grants(effects) == [("w1", 8)]


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
