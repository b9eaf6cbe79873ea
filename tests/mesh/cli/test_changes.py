"""What is printed of a mesh's processes where there is no terminal."""

from mesh.cli.changes import Changes
from mesh.cli.state import MeshState, ProcessState


def mesh(phase: str, why: str = "", **states: str) -> MeshState:
    processes = [
        ProcessState(role=role, index=0, pid=1, state=state, restarts=0, ports={}, log="", why=why)
        for role, state in states.items()
    ]
    return MeshState(
        supervisor_pid=1,
        supervisor_created=0.0,
        phase=phase,
        model="tiny",
        http_urls=[],
        grpc_addresses=[],
        scheduler_addresses=[],
        processes=processes,
    )


def test_a_start_tells_each_readiness_once_and_a_stop_nothing() -> None:
    changes = Changes()
    assert changes.since_last(mesh("starting", gateway="starting", worker="starting")) == []
    assert changes.since_last(mesh("starting", gateway="starting", worker="ready")) == ["worker-0 is ready"]
    assert changes.since_last(mesh("ready", gateway="ready", worker="ready")) == ["gateway-0 is ready"]
    assert changes.since_last(mesh("ready", gateway="ready", worker="ready")) == []
    assert changes.since_last(mesh("stopping", gateway="stopping", worker="ready")) == []
    assert changes.since_last(mesh("stopping", gateway="stopped", worker="stopped")) == []


def test_an_end_and_what_follows_it_are_told() -> None:
    changes = Changes()
    changes.since_last(mesh("ready", worker="ready"))
    killed = mesh("degraded", worker="restarting", why="ended by SIGKILL")
    assert changes.since_last(killed) == ["worker-0 ended by SIGKILL and is started again"]
    assert changes.since_last(mesh("ready", worker="ready")) == ["worker-0 is ready"]
    failed = mesh("degraded", worker="failed", why="ended with exit code 1")
    assert changes.since_last(failed) == ["worker-0 has failed: ended with exit code 1"]


def test_scaling_is_told_both_ways() -> None:
    changes = Changes()
    changes.since_last(mesh("ready", worker="ready"))
    assert changes.since_last(mesh("ready", worker="ready", cache="starting")) == ["cache-0 is starting"]
    assert changes.since_last(mesh("ready", worker="ready", cache="stopping")) == ["cache-0 is stopping"]
    assert changes.since_last(mesh("ready", worker="ready")) == ["cache-0 is gone"]
