"""An idle engine waits for companions only where they are to be expected."""

import socket
import threading
from collections.abc import Iterator

import pytest

from gpu_worker.engine.bulk import BulkPort, Kind
from gpu_worker.engine.frames import FramePort
from gpu_worker.engine.messages import Abort, Shutdown, StepDone, Submit, decode_report, encode
from gpu_worker.engine.process import _Port, serve
from gpu_worker.engine.window import Window

LEAST_S, MOST_S = 0.030, 0.050


def window(**options) -> Window:
    return Window(LEAST_S, MOST_S, options.pop("enough", 32), **options)


def start(window: Window, arrivals_s: list[float], now_s: float = 100.0) -> float:
    """One idle start, choices arriving at these times after the first; returns how long the engine waited."""
    window.idle()
    arrivals, waited = [now_s + at for at in arrivals_s], now_s
    while True:
        while arrivals and arrivals[0] <= waited:
            window.arrived(1, arrivals.pop(0))
        left = window.left_s(waited)
        if not left:
            break
        waited = min([waited + left, *arrivals[:1]])
    window.close()
    for at in arrivals:
        window.arrived(1, at)  # while steps run
    return waited - now_s


def test_a_client_that_is_alone_never_waits() -> None:
    here = window()
    assert [start(here, [0.0], 100.0 + n) for n in range(10)] == [0.0] * 10


def test_after_two_bursts_it_waits_until_as_many_are_there_and_no_longer() -> None:
    here = window()
    burst = [0.0, 0.004, 0.008, 0.012]
    waited = [start(here, burst, 100.0 + n) for n in range(4)]
    assert waited[:2] == [0.0, 0.0]
    assert waited[2:] == pytest.approx([0.012, 0.012])


def test_the_first_lone_request_after_bursts_waits_the_least_and_the_next_not_at_all() -> None:
    here = window()
    for n in range(5):
        start(here, [0.0, 0.01], 100.0 + n)
    assert start(here, [0.0], 200) == pytest.approx(LEAST_S)
    assert start(here, [0.0], 201) == 0.0
    assert start(here, [0.0], 202) == 0.0


def test_a_trickle_ends_it_at_the_most() -> None:
    here = window()
    for n in range(2):
        start(here, [0.0005 * at for at in range(30)], 100.0 + n)
    assert start(here, [0.01 * at for at in range(20)], 200) == pytest.approx(MOST_S)


def test_a_full_batch_ends_it_at_once() -> None:
    here = window(enough=3, always=True)
    assert start(here, [0.0, 0.001, 0.002, 0.003]) == pytest.approx(0.002)


def test_a_static_batch_waits_for_a_full_one_always() -> None:
    here = window(enough=8, always=True)
    assert start(here, [0.0]) == pytest.approx(LEAST_S)
    assert start(here, [0.0, 0.025], 200) == pytest.approx(0.040)


def test_requests_that_come_in_the_middle_of_others_open_nothing() -> None:
    here = window(always=True)
    here.idle()
    here.arrived(1, 100.0)
    here.close()
    here.arrived(1, 100.001)
    assert here.left_s(100.001) == 0.0


def test_no_window_where_it_is_set_to_nothing() -> None:
    here = Window(0.0, 0.0, 8, always=True)
    assert start(here, [0.0]) == 0.0


@pytest.fixture
def waiting(lab) -> Iterator[tuple[FramePort, BulkPort]]:
    """Both ends to an engine that waits a minute for three choices, and has a first one."""
    (ours, theirs), (our_blocks, their_blocks) = socket.socketpair(), socket.socketpair()
    open_long = Window(60.0, 60.0, 3, always=True)
    loop = threading.Thread(target=serve, args=(lab.engine(), _Port(theirs, their_blocks), open_long), daemon=True)
    loop.start()
    port = FramePort(ours)
    port.send(encode(Submit(lab.plan("first"))))
    yield port, BulkPort(our_blocks)
    port.send(encode(Shutdown()))
    loop.join(10)
    assert not loop.is_alive()
    for end in (ours, theirs, our_blocks, their_blocks):
        end.close()


def report(port: FramePort) -> StepDone:
    assert port.pending(20.0), "the engine went on waiting"
    done = decode_report(port.receive())
    assert isinstance(done, StepDone)
    return done


def test_an_abort_is_obeyed_in_the_middle_of_the_window(waiting) -> None:
    port, _ = waiting
    port.send(encode(Abort("first", 1)))
    assert report(port).result.load.running == []


def test_blocks_move_in_the_middle_of_the_window(waiting) -> None:
    port, blocks = waiting
    blocks.send(Kind.DUMP, b"?" * 16)
    assert blocks.pending(20.0)
    assert blocks.receive().kind == Kind.DUMPED
    assert not port.pending(), "it began"


def test_the_last_one_of_a_batch_lets_it_begin(waiting, lab) -> None:
    port, _ = waiting
    port.send(encode(Submit(lab.plan("second"))))
    port.send(encode(Submit(lab.plan("third"))))
    assert len(report(port).result.load.running) == 3
