"""The process in which grammars are compiled: `python -m gpu_worker.engine.grammar_process`, started by the engine's.

A grammar from a client may take for ever or all memory to compile, or bring the compiler down. So this process, which
has read the vocabulary and runs no threads, only forks: each text gets a child, warm from its first moment, and that
child ends with it. Alarms kill the child when its time is over, even inside native code; a limit stops its memory;
and it is killed when nobody wants its answer any more. Children yield the cores to the engine, so the first limit is
of processor time; by the clock it is WAITING times that.
"""

import os
import resource
import signal
import sys
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NamedTuple

import msgspec

from gpu_worker.engine.grammar_line import PLACES, Line
from gpu_worker.engine.grammar_workshop import Job, Setup, Workshop, too_much

MOST_DATA_BYTES = 3 << 29  # of one child
YIELDING = 5  # added to its niceness
WAITING = 2.0
OOM_SCORE = Path("/proc/self/oom_score_adj")

_encode = msgspec.msgpack.encode


class Drop(msgspec.Struct, frozen=True, tag=True):
    """Nobody wants that job's answer any more; there will be none."""

    number: int


class _Child(NamedTuple):
    pid: int
    job: Job
    place: int


class Parent:
    """Forks, listens to its children and to the engine, and does nothing that takes time."""

    def __init__(self, port: Connection, workshop: Workshop, limit_s: float) -> None:
        self._port = port
        self._workshop = workshop
        self._limit_s = limit_s
        self._line = Line()
        self._children: dict[Connection, _Child] = {}

    def serve(self) -> None:
        """Until the engine is gone: EOFError or OSError."""
        try:
            while True:
                for source in wait([self._port, *self._children]):
                    if source is self._port:
                        self._obey(self._port.recv_bytes())
                    elif source in self._children:
                        self._port.send_bytes(self._answer(source))
                self._fork()
        finally:
            for pipe in list(self._children):
                self._end(pipe)

    def _obey(self, message: bytes) -> None:
        order = msgspec.msgpack.decode(message, type=Job | Drop)
        if isinstance(order, Job):
            self._line.add(order)
            return
        self._line.drop(order.number)
        for pipe in [pipe for pipe, child in self._children.items() if child.job.number == order.number]:
            self._end(pipe)

    def _fork(self) -> None:
        taken = {child.place for child in self._children.values()}
        for place in PLACES:
            if place not in taken and (job := self._line.next(place)) is not None:
                self._compile(job, place)

    def _compile(self, job: Job, place: int) -> None:
        ours, theirs = Pipe(duplex=False)
        pid = os.fork()
        if not pid:
            self._port.close()
            _live(self._workshop, job, self._limit_s, theirs)
        theirs.close()
        self._children[ours] = _Child(pid, job, place)

    def _answer(self, pipe: Connection) -> bytes:
        """What a child says, or its death means."""
        job = self._children[pipe].job
        try:
            return pipe.recv_bytes()
        except (EOFError, OSError):
            return _encode(too_much(job, "time or memory to compile"))
        finally:
            self._end(pipe)

    def _end(self, pipe: Connection) -> None:
        pid = self._children.pop(pipe).pid
        pipe.close()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _live(workshop: Workshop, job: Job, limit_s: float, answers: Connection) -> None:
    """The whole life of a child. Never returns."""
    try:
        OOM_SCORE.write_text("1000")  # where memory runs out all the same, this process goes first
        resource.setrlimit(resource.RLIMIT_DATA, (MOST_DATA_BYTES, MOST_DATA_BYTES))
        _limit(limit_s)
        compiled = workshop.compiled(job)
        _limit(0)
        answers.send_bytes(_encode(compiled))
    finally:
        os._exit(0)


def _limit(seconds: float) -> None:
    """This process ends when the time is over; 0 = never."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, seconds * WAITING)


def main(fd: int) -> None:
    """Until the other end is closed."""
    for number in (signal.SIGINT, signal.SIGTERM):  # they may reach the whole group; the engine's end is ours
        signal.signal(number, signal.SIG_IGN)
    for number in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(number, signal.SIG_DFL)
    os.nice(YIELDING)
    with Connection(fd) as port:
        try:
            setup = msgspec.msgpack.decode(port.recv_bytes(), type=Setup)
            workshop = Workshop(setup)
            port.send_bytes(b"")
            Parent(port, workshop, setup.limit_s).serve()
        except (EOFError, OSError):
            return


if __name__ == "__main__":
    main(int(sys.argv[1]))
