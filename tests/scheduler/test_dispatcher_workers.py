"""Workers that come, go, report out of turn, and a replica that drains."""

import pytest

from mesh.errors import Superseded, Unavailable
from scheduler.demand import Pins
from scheduler.effects import Disconnected, SnapshotOrdered
from scheduler.leases import Adopt, Failed, FailureKind, Open, State
from scheduler.prefixes import Tier
from scheduler.reports import BlockChange


def test_a_worker_that_leaves_is_given_nothing_and_its_requests_go_elsewhere(bench) -> None:
    connection = bench.attach("w1")
    lease, _ = bench.open()
    bench.dispatcher.detach(connection)
    assert bench.grants(bench.open("r2")[1]) == []
    bench.attach("w2")
    assert bench.dispatcher.lease_count(State.GRANTED) == 2
    assert bench.grants(bench.send(lease, Failed("w1", 1, FailureKind.RESET))) == [("w2", 2)]


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
    assert bench.grants(bench.open()[1]) == [("w1", 1)]


def test_draining_sends_everybody_elsewhere_and_takes_nothing_new(bench) -> None:
    connection = bench.attach()
    bench.open("running")
    bench.open("queued", pins=Pins("other"))
    effects = bench.dispatcher.drain()
    assert [error.code for error in bench.errors(effects)] == ["draining"] * 2
    assert [e.connection for e in effects if isinstance(e, Disconnected)] == [connection]
    for event in (Open(bench.make.demand("new")), Adopt(bench.make.demand("new"), "w1", "w1:1", 1)):
        with pytest.raises(Unavailable) as raised:
            bench.send(50, event)
        assert raised.value.code == "draining"
