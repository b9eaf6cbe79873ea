"""`shoal up --detach` waits for the supervisor that it started, whichever way that goes."""

import subprocess
import sys
from pathlib import Path

import pytest

from mesh.cli import claim, up
from mesh.cli.problem import Problem

# A supervisor that holds the lock, tells of its failure and takes a while to end what had started.
FAILING = """
import os, time
from mesh.cli import claim, state
lock = claim.take()
facts = {name: [] for name in ("http_urls", "grpc_addresses", "scheduler_addresses", "processes")}
state.write(
    state.MeshState(supervisor_pid=os.getpid(), supervisor_created=0, phase="failed", model="m", message="why", **facts)
)
time.sleep(0.5)
"""


def test_a_start_that_failed_is_told_when_its_supervisor_has_ended(home: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", FAILING]) as supervisor:
        said: list[str] = []
        with pytest.raises(Problem, match=r"^the mesh did not start: why"):
            up.wait_ready(supervisor, 30, said.append)
        assert supervisor.returncode == 0
        assert "it did not start" in said[-1]
        assert not claim.is_taken()


def test_a_failed_supervisor_that_does_not_end_is_not_waited_for_without_end(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(up, "STOP_SPARE_S", 0.1)
    with subprocess.Popen([sys.executable, "-c", FAILING.replace("0.5", "60")]) as supervisor:
        with pytest.raises(Problem, match=r"^the mesh did not start: why"):
            up.wait_ready(supervisor, 30, lambda _: None)
        assert supervisor.poll() is None
        supervisor.kill()
