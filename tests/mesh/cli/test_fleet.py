"""The set of processes: what may fail alone, what takes the mesh with it, and who must stay for others to go."""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from mesh.cli.control import Refused, Reply, Scale
from mesh.cli.fleet import Fleet
from mesh.cli.plan import Layout, MeshPlan, ProcessSpec
from mesh.cli.process import StartFailed
from mesh.cli.scaling import ScaleFailed, Scaling
from mesh.cli.supervisor import Supervisor

Eventually = Callable[..., Awaitable[object]]
PLAN = MeshPlan(model="m", workers=2, caches=2)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path))
    return tmp_path


def broken(role: str) -> ProcessSpec:
    code = "raise SystemExit('nothing works here')"
    return ProcessSpec(role=role, index=0, argv=[sys.executable, "-c", code], ports={"grpc": 1})


def fleet() -> Fleet:
    return Fleet(lambda: None, restart=False)


async def test_a_process_that_has_not_joined_fails_alone_and_says_why() -> None:
    some = fleet()
    async with asyncio.TaskGroup() as group:
        some.run_in(group)
        [process] = some.add([broken("worker")])
    assert process.state().state == "failed"
    assert "nothing works here" in str(process.failure)
    assert await some.remove([process]) == []
    assert some.processes == []


@pytest.mark.parametrize(("role", "stands"), [("worker", True), ("cache", False)])
async def test_a_process_that_has_joined_takes_the_mesh_with_it(role: str, stands: bool) -> None:
    some = fleet()
    some.stands = stands
    some.join(some.add([broken(role)]))
    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.TaskGroup() as group:
            some.run_in(group)
    assert caught.group_contains(StartFailed, match="nothing works here")


async def test_a_mesh_that_stands_goes_on_without_a_cache() -> None:
    some = fleet()
    some.stands = True
    some.join(some.add([broken("cache")]))
    async with asyncio.TaskGroup() as group:
        some.run_in(group)
    assert [process.phase for process in some.processes] == ["failed"]


async def test_nobody_goes_before_those_that_are_to_take_over_are_there() -> None:
    layout = Layout(PLAN)
    some = fleet()
    some.join(some.add(layout.first()))
    told: list[tuple[str, str]] = []
    with pytest.raises(ScaleFailed, match="worker-0 is starting, and would have to take over"):
        await Scaling(some, layout).scale({"worker": 1}, 1, lambda *step: told.append(step))
    assert len(some.joined("worker")) == 2
    assert told == []


@pytest.mark.parametrize(
    ("wanted", "why"),
    [({"worker": 3}, "still starting"), ({"worker": 0}, "at least 1"), ({"x": 1}, "cannot be scaled")],
)
async def test_a_mesh_that_is_starting_and_a_request_that_makes_no_sense_are_refused(
    wanted: dict[str, int], why: str
) -> None:
    said: list[Reply] = []
    await Supervisor(PLAN)._scale(Scale(wanted), said.append)
    [refused] = said
    assert isinstance(refused, Refused)
    assert why in refused.message


async def test_urls_and_addresses_are_of_those_that_may_be_turned_to() -> None:
    supervisor = Supervisor(PLAN)
    fleet = supervisor._fleet
    fleet.join(fleet.processes)
    [late] = fleet.add([ProcessSpec(role="gateway", index=1, argv=[], ports={"http": 2, "grpc": 3})])
    assert len(supervisor.snapshot().http_urls) == len(supervisor.snapshot().grpc_addresses) == 1
    assert late.spec.name in {process.name for process in supervisor.snapshot().processes}
    fleet.join([late])
    assert supervisor.snapshot().http_urls[1].endswith(":2")
    fleet.part([late])
    assert len(supervisor.snapshot().http_urls) == 1
