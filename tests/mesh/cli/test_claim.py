"""One mesh a home: the second `shoal up` is told so at once and touches nothing of the first."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import psutil
import pytest
from typer.testing import CliRunner

from mesh.cli import claim, state
from mesh.cli.main import app
from mesh.cli.problem import Problem
from mesh.cli.state import MeshState

# Whoever holds the lock, as `shoal up` does: says so, and ends with its input.
HOLDER = "import sys; from mesh.cli import claim; lock = claim.take(); print('held', flush=True); sys.stdin.read()"


def holder() -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def files(home: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in home.rglob("*") if path.is_file()}


def written(phase: str, pid: int) -> MeshState:
    return MeshState(
        supervisor_pid=pid,
        supervisor_created=psutil.Process(pid).create_time(),
        phase=phase,
        model="tiny",
        http_urls=[],
        grpc_addresses=[],
        scheduler_addresses=[],
        processes=[],
    )


@pytest.mark.parametrize(
    ("phase", "said"),
    [
        ("", "a mesh is starting"),
        ("starting", "a mesh is starting (supervisor {})"),
        ("ready", "a mesh runs already (supervisor {})"),
        ("stopping", "the mesh is stopping"),
        ("failed", "a mesh that did not start is ending"),
    ],
)
@pytest.mark.parametrize("how", [[], ["--detach"]])
def test_a_second_up_is_told_of_the_first_and_touches_nothing(home: Path, phase: str, said: str, how: list[str]):
    with holder() as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"
        state.logs_dir().mkdir()
        (state.logs_dir() / "supervisor.log").write_text("of the first\n")
        if phase:
            state.write(written(phase, first.pid))
        before = files(home)
        problem = CliRunner().invoke(app, ["up", "--engine", "simulated", *how]).exception
        assert isinstance(problem, Problem)
        assert problem.message == said.format(first.pid)
        assert files(home) == before
        first.communicate("")


def test_the_lock_outlives_its_taker_in_the_process_that_was_handed_it(home: Path):
    lock = claim.take()
    heir = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[lock])
    os.close(lock)
    assert claim.is_taken()
    with pytest.raises(Problem):
        claim.take()
    heir.communicate(b"\n")
    assert not claim.is_taken()
    os.close(claim.take())


def test_the_supervisor_in_the_background_takes_the_lock_if_nobody_did_for_it(home: Path):
    plan = msgspec.json.encode({"model": "tiny"}).decode()
    lock = claim.take()
    ran = subprocess.run([sys.executable, "-m", "mesh.cli.daemon", plan], capture_output=True, text=True, timeout=30)
    os.close(lock)
    assert ran.returncode == 1
    assert ran.stderr.startswith("a mesh is starting")
    assert not state.state_file().exists()


@pytest.mark.parametrize("command", ["down", "status"])
def test_nobody_is_told_that_none_runs_while_one_begins(home: Path, command: str):
    lock = claim.take()
    problem = CliRunner().invoke(app, [command]).exception
    os.close(lock)
    assert isinstance(problem, Problem)
    assert "starting" in problem.message


def test_looking_for_a_mesh_leaves_no_trace(home: Path):
    assert not claim.is_taken()
    assert not home.exists()


def test_those_who_look_do_not_take_each_other_for_a_mesh(home: Path):
    os.close(claim.take())
    with ThreadPoolExecutor(4) as lookers:
        assert not any(lookers.map(lambda _: claim.is_taken(), range(4000)))
