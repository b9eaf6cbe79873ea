"""The command line as a user drives it: up in the background, status, down, and nothing left."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import httpx
import msgspec
import psutil
import pytest

from mesh import models
from mesh.cli.state import MeshState

pytestmark = pytest.mark.e2e


@pytest.fixture
def home(model: str, tmp_path: Path) -> Path:
    """A home folder of the user's that has the model. Engines are simulated: what they compute is not looked at."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / model).symlink_to(models.find(model).path)
    return tmp_path


@pytest.mark.timeout(240)
def test_up_detached_then_status_then_down_leaves_no_process(home: Path) -> None:
    env = os.environ | {"SHOAL_HOME": str(home), "SHOAL_MODLE": "x"}

    def shoal(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "mesh.cli.main", *words]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=150)

    up = shoal("up", "--detach", "--workers", "2", "--engine", "simulated")
    try:
        assert up.returncode == 0, up.stderr
        assert up.stdout.count("SHOAL_MODLE") == 1, up.stdout
        assert "did you mean SHOAL_MODEL?" in up.stdout
        status = shoal("status", "--json")
        assert status.returncode == 0, status.stderr
        mesh = json.loads(status.stdout)
        assert mesh["phase"] == "ready"
        roles = sorted(process["role"] for process in mesh["processes"])
        assert roles == ["cache", "gateway", "scheduler", "valkey", "worker", "worker"]
        assert len(mesh["workers"]) == 2
        pids = [process["pid"] for process in mesh["processes"]] + [mesh["supervisor_pid"]]
        family = [
            psutil.Process(mesh["supervisor_pid"]),
            *psutil.Process(mesh["supervisor_pid"]).children(recursive=True),
        ]
        assert set(pids) <= {process.pid for process in family}
        assert httpx.get(f"{mesh['http_urls'][0]}/ready").status_code == 200
        assert shoal("up").returncode == 1, "a second mesh started in the same home"
        gateway = next(process["pid"] for process in mesh["processes"] if process["role"] == "gateway")
        os.kill(gateway, signal.SIGKILL)
        wait_for(lambda: phase(home) == "degraded")
        wait_for(lambda: phase(home) == "ready")
        record = (home / "run" / "logs" / "supervisor.log").read_text()
        assert f"gateway-0 ended by SIGKILL (pid {gateway})" in record
    finally:
        down = shoal("down")
    assert down.returncode == 0, down.stderr
    assert not [process for process in family if process.is_running()]
    assert shoal("status", "--json").returncode == 1
    assert shoal("down").returncode == 0


def last_state(home: Path) -> MeshState | None:
    with suppress(FileNotFoundError):
        return msgspec.json.decode((home / "run" / "mesh.json").read_bytes(), type=MeshState)
    return None


def phase(home: Path) -> str | None:
    mesh = last_state(home)
    return mesh.phase if mesh is not None else None


def wait_for(condition: Callable[[], bool], timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def valkey_is_ready(home: Path) -> bool:
    mesh = last_state(home)
    return mesh is not None and any(p.role == "valkey" and p.state == "ready" for p in mesh.processes)


@pytest.mark.timeout(90)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_starting_ends_up_and_leaves_no_process(home: Path, number: signal.Signals) -> None:
    env = os.environ | {"SHOAL_HOME": str(home)}
    command = [sys.executable, "-m", "mesh.cli.main", "up", "--engine", "simulated"]
    family: list[psutil.Process] = []
    up = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        wait_for(lambda: valkey_is_ready(home) or up.poll() is not None)
        family = psutil.Process(up.pid).children(recursive=True)
        up.send_signal(number)
        said, _ = up.communicate(timeout=15)
    finally:
        up.kill()
        _, left = psutil.wait_procs(family, timeout=5)
        for process in left:
            process.kill()
    assert up.returncode == 0
    assert "Stopped." in said
    assert not left, f"left behind: {left}"


@pytest.mark.timeout(150)
def test_up_without_a_terminal_tells_each_readiness_before_what_to_try(home: Path) -> None:
    env = os.environ | {"SHOAL_HOME": str(home)}
    command = [sys.executable, "-m", "mesh.cli.main", "up", "--engine", "simulated"]
    up = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        wait_for(lambda: phase(home) == "ready" or up.poll() is not None, timeout_s=90)
        up.send_signal(signal.SIGINT)
        said, _ = up.communicate(timeout=45)
    finally:
        up.kill()
    notice, *lines = said.splitlines()
    assert notice.startswith("SIMULATED")
    told = [line for line in lines if line != "cache-0 is ready"]  # nothing waits for that one
    names = ("valkey-0", "scheduler-0", "worker-0", "gateway-0")
    assert sorted(told[:4]) == sorted(f"{name} is ready" for name in names)
    assert told[4].startswith("HTTP")
    assert (up.returncode, lines[-1]) == (0, "Stopped.")
