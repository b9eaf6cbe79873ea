"""The engine as a process of its own: it proves itself, obeys between steps, and leaves when the worker is gone."""

import multiprocessing
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gpu_worker.engine import process
from gpu_worker.engine.api import FinishedEvent, Reason, TokensEvent
from gpu_worker.engine.config import EngineConfig
from gpu_worker.engine.frames import FramePort
from gpu_worker.engine.messages import (
    Abort,
    BlockKeys,
    Fatal,
    Loading,
    Park,
    Ready,
    Rejected,
    Report,
    Shutdown,
    Snapshot,
    StepDone,
    StopChoice,
    Submit,
    decode_report,
    encode,
)
from mesh.errors import InvalidRequest

WAIT_S = 60.0


def receive(conn: FramePort) -> Report:
    assert conn.pending(WAIT_S), "the engine process says nothing"
    return decode_report(conn.receive())


def receive_until(conn: FramePort, kind: type) -> list[Report]:
    reports = [receive(conn)]
    while not isinstance(reports[-1], kind):
        assert not isinstance(reports[-1], Fatal), reports[-1]
        reports.append(receive(conn))
    return reports


def ends(conn: FramePort, count: int) -> dict[str, FinishedEvent]:
    found: dict[str, FinishedEvent] = {}
    while len(found) < count:
        report = receive(conn)
        if isinstance(report, StepDone):
            found |= {event.request_id: event for event in report.result.events if isinstance(event, FinishedEvent)}
    return found


@contextmanager
def started(config: EngineConfig) -> Iterator[FramePort]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = socket.socketpair()
    child = context.Process(target=process.run, args=(theirs, config))
    child.start()
    theirs.close()
    port = FramePort(ours)
    try:
        yield port
    finally:
        port.close()
        child.join(WAIT_S)
        assert child.exitcode == 0


@pytest.fixture(scope="module")
def config(tiny_folder) -> EngineConfig:
    return EngineConfig(model=str(tiny_folder.path), precision="fp32", kv_bytes=1 << 20, threads=1)


@pytest.fixture(scope="module")
def engine(config) -> Iterator[FramePort]:
    """One process for the tests that leave it idle; it ends by Shutdown."""
    with started(config) as conn:
        reports = receive_until(conn, Ready)
        assert all(isinstance(report, Loading) for report in reports[:-1])
        assert [report.fraction for report in reports[:-1]] == sorted(report.fraction for report in reports[:-1])
        yield conn
        conn.send(encode(Shutdown()))
        while conn.pending(WAIT_S):  # until it has closed its end
            try:
                conn.receive()
            except EOFError:
                break


def send(conn: FramePort, *commands) -> None:
    for command in commands:
        conn.send(encode(command))


def test_it_answers_as_the_engine_in_process(engine, lab):
    plan = lab.plan("same", [4, 5, 6] * 9, temperature=1.0)
    send(engine, Submit(plan))
    events = []
    while not (events and isinstance(events[-1], FinishedEvent)):
        events += receive(engine).result.events
    ids = [token for event in events if isinstance(event, TokensEvent) for token in event.ids]
    assert ids == lab.answer(lab.engine(), plan)


def test_a_refused_request_is_answered_with_its_error(engine, lab):
    send(engine, Submit(lab.plan("bad", [3], temperature=9.0, attempt=4)))
    (rejected, *_) = receive_until(engine, StepDone)
    assert isinstance(rejected, Rejected)
    assert (rejected.request_id, rejected.attempt) == ("bad", 4)
    error = rejected.error()
    assert isinstance(error, InvalidRequest)
    assert error.field == "temperature"


def test_commands_take_effect_between_steps(engine, lab):
    plans = [lab.plan(name, [8] * 20, max_tokens=200) for name in ("parked", "stopped", "aborted", "free")]
    send(engine, *map(Submit, plans))
    while len(receive(engine).result.load.computed) < 4:
        pass
    send(engine, Park("parked", 1), StopChoice("stopped", 1, 0, 0), Abort("aborted", 1))
    found = ends(engine, 3)
    assert {name: end.reason for name, end in found.items()} == {
        "parked": Reason.PARKED,
        "stopped": Reason.STOP,
        "free": Reason.LENGTH,
    }


def test_an_abort_of_the_last_request_is_followed_by_a_report_of_free_blocks(engine, lab):
    send(engine, Submit(lab.plan("x", [8] * 20, max_tokens=230)))
    receive_until(engine, StepDone)
    send(engine, Abort("x", 1))
    while (load := receive(engine).result.load).running:
        pass
    assert load.used_blocks == 0


def test_a_snapshot_tells_the_cached_blocks(engine, lab):
    send(engine, Submit(lab.plan("keys", list(range(3, 53)), max_tokens=1, cache_salt=b"own")))
    stored = [key for report in receive_until(engine, StepDone) for key in report.result.blocks_stored]
    send(engine, BlockKeys())
    snapshot = receive_until(engine, Snapshot)[-1]
    assert len(stored) == 3
    assert set(stored) <= set(snapshot.keys)


def test_an_engine_with_nothing_to_do_gets_ready_for_grammars(lab, monkeypatch):
    """In the background, and answers go on meanwhile."""
    monkeypatch.setattr(process, "LEISURE_S", 0.1)
    ours, theirs = socket.socketpair()
    made = lab.engine()
    press = made._preparations._compiler._press
    loop = threading.Thread(target=process.serve, args=(made, process._Port(theirs)), daemon=True)
    loop.start()
    conn = FramePort(ours)
    send(conn, Submit(lab.plan("first")))
    ends(conn, 1)
    assert press._thread is None
    end_s = time.monotonic() + WAIT_S
    while press._thread is None:
        assert time.monotonic() < end_s, "the grammar process was never started"
        time.sleep(0.01)
    send(conn, Submit(lab.plan("second")))
    assert ends(conn, 1)["second"].reason is Reason.LENGTH
    send(conn, Shutdown())
    loop.join(WAIT_S)
    press.close()
    conn.close()
    theirs.close()


def test_it_leaves_when_the_worker_is_gone_in_mid_answer(config, lab):
    with started(config) as conn:
        receive_until(conn, Ready)
        send(conn, Submit(lab.plan("x", max_tokens=200)))  # and the connection closes in mid-answer


def test_a_model_that_cannot_be_served_is_fatal_and_says_why(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with started(EngineConfig(model=str(tmp_path))) as conn:
        while isinstance(report := receive(conn), Loading):
            pass
        assert isinstance(report, Fatal)
        assert "holds no weights" in report.message
