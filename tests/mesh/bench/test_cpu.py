"""CPU time of processes by the role that they play."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from mesh.bench.cpu import RoleClock, difference
from mesh.bench.report import CannotMeasure
from mesh.cli.state import ProcessState

# A worker whose child computes while it waits; the first line says that the child runs.
WORKER = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "print(1, flush=True)\\nwhile True: pass"])
try:
    sys.stdin.read()
finally:
    child.kill()
    child.wait()
"""


@contextmanager
def worker() -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen([sys.executable, "-c", WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"1\n"
        yield process
        process.communicate(timeout=10)


def state(role: str, pid: int | None) -> ProcessState:
    return ProcessState(role=role, index=0, pid=pid, state="ready", restarts=0, ports={}, log="")


async def test_what_a_workers_child_computes_is_the_engines(eventually):
    with worker() as process:
        clock = RoleClock([state("worker", process.pid), state("gateway", None)])
        before = clock.read()
        assert before.keys() == {"worker", "engine"}
        await eventually(lambda: difference(before, clock.read())["engine"] >= 0.1)
        assert difference(before, clock.read())["worker"] < 0.1


def test_a_process_that_ended_cannot_be_measured():
    with worker() as process:
        clock = RoleClock([state("worker", process.pid)])
    with pytest.raises(CannotMeasure, match="ended while it was measured"):
        clock.read()
