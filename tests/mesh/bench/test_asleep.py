"""A server that stands still but for its own batches, with all that it has started."""

import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress

import psutil
import pytest

from mesh.bench.asleep import Asleep

PARENT = (
    "import subprocess, sys\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    "print(child.pid, flush=True)\n"
    "child.wait()\n"
)


@pytest.fixture
def family():
    """A process and its child, which are ended whatever state they are in."""
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        yield [psutil.Process(parent.pid), child]
        with suppress(psutil.NoSuchProcess):
            child.kill()
        parent.kill()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def still(family: list[psutil.Process]) -> bool:
    return all(one.status() == psutil.STATUS_STOPPED for one in family)


def test_all_of_a_server_sleeps_but_for_its_own_batches(family):
    asleep = Asleep(family[0].pid)
    until(lambda: still(family))
    with asleep.awake():
        until(lambda: not any(one.status() == psutil.STATUS_STOPPED for one in family))
    until(lambda: still(family))
    asleep.wake()
    until(lambda: not any(one.status() == psutil.STATUS_STOPPED for one in family))


def test_a_server_that_has_ended_is_let_be(family):
    asleep = Asleep(family[0].pid)
    for one in reversed(family):
        one.kill()
    psutil.wait_procs(family, timeout=10)
    asleep.wake()
