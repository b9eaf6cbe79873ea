"""What `shoal scale` says: problems in words before anything is done, and what there is afterwards."""

import pytest
from rich.console import Console
from typer.testing import CliRunner

from mesh.cli.main import app
from mesh.cli.problem import Problem
from mesh.cli.view import scaled, steps


def test_a_request_that_makes_no_sense_is_a_problem_whether_a_mesh_runs_or_not(home) -> None:
    problem = CliRunner().invoke(app, ["scale", "worker=3", "gateways=2"]).exception
    assert isinstance(problem, Problem)
    assert (
        problem.message == "'gateways' cannot be scaled; roles are gateway, scheduler, worker, cache; nothing was done"
    )
    assert not home.exists()


def test_without_a_mesh_there_is_nothing_to_scale(home) -> None:
    problem = CliRunner().invoke(app, ["scale", "worker=3"]).exception
    assert isinstance(problem, Problem)
    assert problem.message == "no mesh is running"


def test_scale_asks_for_at_least_one_role() -> None:
    assert CliRunner().invoke(app, ["scale"]).exit_code == 2


@pytest.mark.parametrize(
    ("told", "lines"),
    [
        ({"": "waiting for another scale to end"}, ["waiting for another scale to end"]),
        (
            {"": "waiting for another scale to end", "worker-1": "ready", "gateway-1": "draining"},
            ["process    state", "worker-1   ready", "gateway-1  draining"],
        ),
    ],
)
def test_the_last_step_of_each_process_is_shown(told: dict[str, str], lines: list[str]) -> None:
    console = Console(width=80)
    with console.capture() as capture:
        console.print(steps(told))
    assert [line.rstrip() for line in capture.get().splitlines()] == lines


def test_the_end_names_what_there_is_and_what_was_killed() -> None:
    assert scaled({"gateway": 1, "worker": 2}, []) == "The mesh has 1 gateway, 2 workers."
    assert scaled({"cache": 0}, ["cache-0"]) == "The mesh has 0 caches. Killed, because not drained in time: cache-0."
